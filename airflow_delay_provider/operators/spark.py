"""spark-submit whose transient failures are tried again by a message, while the task holds no slot."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.failures import failing_at_once
from airflow_delay_provider.hooks.spark import GuardedSparkSubmitHook, is_unknown_job
from airflow_delay_provider.hooks.spark_cluster import find_cluster
from airflow_delay_provider.hooks.ticket_office import TicketOffice, TicketPlaces
from airflow_delay_provider.links import DelayedMessageLink, message_url
from airflow_delay_provider.operators.origin import origin_of
from airflow_delay_provider.spark.attempt_table import attempt_table
from airflow_delay_provider.spark.failures import Rules, Verdict, classify
from airflow_delay_provider.spark.history import HISTORY_KEY, WORKER_LOST, History, Phase
from airflow_delay_provider.spark.retrying import SparkRetries, decide
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, DEFAULT_DEAD_LETTER_CHANNEL, Ticket, WaitsFor
from airflow_delay_provider.triggers.spark import RetryTicketTrigger, TicketEnd

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.spark.probes import ClusterAddress

_WHY_STOPPED = {
    TicketEnd.GIVEN_UP: "it was given up",
    TicketEnd.EXPIRED: "the cluster is down and max_elapsed would be over before it is looked at again",
    TicketEnd.LOST: "its ticket could not be dispatched",
}


class SparkSubmitRetryOperator(SparkSubmitOperator):
    """Submit a Spark job and, where its failure may pass, submit it again later, all in one try of the task.

    A failure is classified. A permanent one fails the task at once. After any other a ticket is scheduled and the task
    is deferred until it comes, without a worker slot or a JVM. While the cluster is down, the ticket is extended and
    costs no attempt. Expediting the ticket tries now, cancelling it gives the task up.

    Whatever is killed, the next try of the task goes on where the last one stood, so keep ``retries`` at 1 or more.

    :param spark_retries: how often and how soon; see :class:`~airflow_delay_provider.spark.retrying.SparkRetries`.
    :param failure_rules: rules that are tried before the built-in ones.
    :param cluster_check: dotted path of a function that gets ``conn_id`` and says whether the cluster is up, instead of
        asking the master, ResourceManager or API server.
    :param starvation_timeout: how long nobody may work on a job before it is ended and tried again; None is for ever.
    :param delay_conn_id: the connection of the broker that carries tickets.
    :param hold: who keeps their wait; None is what the connection says.
    :param ticket_channel: where tickets go.
    :param dead_letter_channel: where a message goes when all attempts are used up; None is nowhere.
    """

    operator_extra_links = (DelayedMessageLink(),)

    def __init__(
        self,
        *,
        spark_retries: SparkRetries | None = None,
        failure_rules: Sequence[Mapping[str, Any]] = (),
        cluster_check: str | None = None,
        starvation_timeout: timedelta | None = timedelta(minutes=10),
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        ticket_channel: str = DEFAULT_CHANNEL,
        dead_letter_channel: str | None = DEFAULT_DEAD_LETTER_CHANNEL,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spark_retries = spark_retries or SparkRetries()
        self.failure_rules = failure_rules
        self.cluster_check = cluster_check
        self.starvation_timeout = starvation_timeout
        self.ticket_places = TicketPlaces(
            delay_conn_id=delay_conn_id,
            hold=hold,
            channel=ticket_channel,
            dead_letter_channel=dead_letter_channel,
        )
        #: The address for the link; None until this process has scheduled a ticket.
        self.message_link: str | None = None
        self._clock = SystemClock()
        self._ticket_id: str | None = None
        self._was_killed = False

    # -- the way of a task ---------------------------------------------------------------------------------------

    def execute(self, context: Context) -> None:
        """Begin, or go on where an earlier try of this task was cut off."""
        self.message_link = ""
        history = self._load(context)
        if history is None or history.phase is Phase.ENDED or self._was_cleared(context, history):
            history = History(began_at=self._clock.now())
        elif history.phase is Phase.WAITING:
            self.log.info("An earlier try of this task was waiting for its ticket")
            self._wait(context, history, self._next_ticket(context, history))
        elif not self._is_job_known(context):
            history = history.fail_attempt(WORKER_LOST, self._clock.now())
            self._delay_or_stop(context, history)
        self._wait_out_a_known_outage(context, history)
        self._submit(context, history)

    def resume(self, context: Context, event: dict[str, Any]) -> None:
        """Come back with the ticket."""
        history = self._load(context) or History(began_at=self._clock.now())
        end = TicketEnd(event["end"])
        if end is not TicketEnd.GO:
            if end is not TicketEnd.GIVEN_UP:
                self._send_dead_letter(context, history, _WHY_STOPPED[end])
            self._stop(context, history, _WHY_STOPPED[end])
        with TicketOffice(self.ticket_places) as office:
            office.sweep()
            office.await_turn(self._cluster())
        self._submit(context, history)

    def _submit(self, context: Context, history: History) -> None:
        if history.phase is not Phase.SUBMITTED:
            history = history.begin_attempt(self._clock.now())
        # Before the submission: should this worker be gone, the next one knows of it.
        self._store(context, history)
        self._hook = hook = self._get_hook()
        try:
            self._run_job(context)
        except Exception as error:
            if self._was_killed:
                # Airflow lets an ended task run on: nobody waits for a ticket of it.
                raise
            if not hook.was_started and not self._is_job_known(context):
                # Nothing was submitted: the task is wrong, not the job.
                self._store(context, history.end(self._clock.now()))
                raise
            evidence = hook.evidence(error)
            finding = classify(evidence, Rules.builtin().extended_by(self.failure_rules))
            history = history.fail_attempt(finding, self._clock.now(), exit_code=evidence.exit_code)
        else:
            self._store(context, history.end(self._clock.now()))
            return
        history = history.wait_until(self._clock.now() + self._delay_or_stop(context, history))
        self._wait(context, history, self._next_ticket(context, history))

    def _delay_or_stop(self, context: Context, history: History) -> timedelta:
        """Return how long to wait after the last failure; fail the task where it is not tried again."""
        decision = decide(history, self.spark_retries, now=self._clock.now(), random=random.random)
        if decision.delay is not None:
            return decision.delay
        if history.last.verdict is not Verdict.PERMANENT:
            self._send_dead_letter(context, history, decision.reason)
        self._stop(context, history, decision.reason)

    def _send_dead_letter(self, context: Context, history: History, reason: str) -> None:
        with TicketOffice(self.ticket_places) as office:
            office.send_dead_letter(origin_of(context), history, reason)

    def _wait(self, context: Context, history: History, ticket: Ticket) -> NoReturn:
        """Let go of the worker until the ticket comes."""
        self._store(context, history)
        self._ticket_id = ticket.id
        with failing_at_once(), TicketOffice(self.ticket_places) as office:
            since = office.schedule(ticket)
        self._tell(context, history, ticket)
        self.defer(
            trigger=RetryTicketTrigger(
                ticket=ticket.as_json(),
                since=since,
                give_up_at=(history.began_at + self.spark_retries.max_elapsed).isoformat(),
                spark_conn_id=self._conn_id,
                cluster_check=self.cluster_check,
                channel=self.ticket_places.channel,
                delay_conn_id=self.ticket_places.delay_conn_id,
                hold=self.ticket_places.hold,
            ),
            method_name="resume",
        )

    def _stop(self, context: Context, history: History, why: str) -> NoReturn:
        self._store(context, history.end(self._clock.now()))
        self._log_table(history)
        if not history.attempts:
            raise AirflowFailException(f"the Spark job was never submitted, as the cluster is down: {why}")
        last = history.last
        # What the job printed stands above in the log.
        raise AirflowFailException(
            f"the Spark job failed at attempt {last.number} ({last.verdict}): {last.reason}; not tried again: {why}"
        ) from None

    def on_kill(self) -> None:
        """Leave no job, no process and no ticket behind."""
        self._was_killed = True
        if self._hook is not None:
            super().on_kill()
        if self._ticket_id is not None:
            with TicketOffice(self.ticket_places) as office:
                office.cancel(self._ticket_id)

    # -- the job and its cluster ---------------------------------------------------------------------------------

    def _run_job(self, context: Context) -> None:
        try:
            super().execute(context)
        except Exception as error:
            if not is_unknown_job(error) or not self._is_job_known(context):
                raise
            self.log.warning("The cluster does not know the job of an earlier attempt any more; submitting anew")
            context["task_state_store"].delete(self.external_id_key)
            super().execute(context)

    def _get_hook(self) -> GuardedSparkSubmitHook:
        return GuardedSparkSubmitHook.guarding(super()._get_hook(), starvation_timeout=self.starvation_timeout)

    def _is_job_known(self, context: Context) -> bool:
        """Whether an earlier attempt has left a job on the cluster that can be asked for."""
        store = context.get("task_state_store")
        return bool(self.durable and store is not None and store.get(self.external_id_key))

    def _cluster(self) -> ClusterAddress:
        return find_cluster(self._conn_id, check=self.cluster_check)

    def _wait_out_a_known_outage(self, context: Context, history: History) -> None:
        """Begin nothing that must fail: others have seen that the cluster is down."""
        if history.phase is Phase.SUBMITTED:
            return
        with TicketOffice(self.ticket_places) as office:
            outage = office.find_outage(self._cluster())
        if outage is not None:
            history = history.wait_until(outage.next_look_at)
            self._wait(context, history, self._next_ticket(context, history, waits_for=WaitsFor.CLUSTER))

    def _next_ticket(self, context: Context, history: History, waits_for: WaitsFor = WaitsFor.BACKOFF) -> Ticket:
        last = history.attempts[-1] if history.attempts else None
        return Ticket(
            origin=origin_of(context),
            began_at=history.began_at,
            attempt=1 if last is None else last.number + 1,
            verdict=Verdict.INFRASTRUCTURE if last is None else last.verdict or "",
            reason="the cluster is down" if last is None else last.reason,
            cluster=self._cluster().name,
            deliver_at=history.next_at or self._clock.now(),
            waits_for=waits_for,
        )

    # -- what is remembered and told -----------------------------------------------------------------------------

    def _was_cleared(self, context: Context, history: History) -> bool:
        """Whether what is stored is of a life before: a user has ended the task, and cleared it since.

        Airflow begins a first try anew, too, when the DAG could not be read as the ticket came: that one waits on.
        """
        ti = context["ti"]
        if ti.try_number != ti.max_tries - (self.retries or 0) + 1:
            return False
        if history.phase is not Phase.WAITING:
            return True
        with TicketOffice(self.ticket_places) as office:
            return office.is_gone(self._next_ticket(context, history).id)

    def _load(self, context: Context) -> History | None:
        store = context.get("task_state_store")
        stored = None if store is None else store.get(HISTORY_KEY)
        return History.from_json(stored) if isinstance(stored, dict) else None

    def _store(self, context: Context, history: History) -> None:
        store = context.get("task_state_store")
        if store is not None:
            store.set(HISTORY_KEY, history.as_json())

    def _tell(self, context: Context, history: History, ticket: Ticket) -> None:
        self._log_table(history)
        self.log.info("Attempt %d is due at %s", ticket.attempt, ticket.deliver_at.isoformat(timespec="seconds"))
        self.message_link = message_url(ticket.id, self.ticket_places.delay_conn_id)
        context["ti"].xcom_push(key=DelayedMessageLink.xcom_key, value=self.message_link)

    def _log_table(self, history: History) -> None:
        for line in attempt_table(history):
            self.log.info("%s", line)
