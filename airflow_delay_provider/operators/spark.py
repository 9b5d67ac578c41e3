"""The operator that submits a Spark job again after a failure that may pass, without holding a worker slot."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.task import origin_of, translate_errors
from airflow_delay_provider.links import DelayedMessageLink, message_url
from airflow_delay_provider.spark.admission import find_outage, wait_for_token
from airflow_delay_provider.spark.cluster.address import find_cluster
from airflow_delay_provider.spark.failures import Rules, Verdict, classify
from airflow_delay_provider.spark.process.job_environment import check_job_connections, find_job_environment
from airflow_delay_provider.spark.process.submit import GuardedSparkSubmitHook, is_unknown_job
from airflow_delay_provider.spark.retries import (
    HISTORY_KEY,
    WORKER_LOST,
    History,
    Phase,
    SparkRetries,
    as_stored,
    attempt_table,
    decide,
)
from airflow_delay_provider.spark.tickets import (
    DEFAULT_CHANNEL,
    DEFAULT_DEAD_LETTER_CHANNEL,
    RetryTickets,
    Ticket,
    WaitsFor,
)
from airflow_delay_provider.triggers.spark import RetryTicketTrigger, TicketOutcome

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delay_provider.spark.cluster.address import ClusterAddress

_WHY_STOPPED = {
    TicketOutcome.GIVEN_UP: "it was given up",
    TicketOutcome.EXPIRED: "the cluster is down and max_elapsed would be over before its next check",
    TicketOutcome.LOST: "its ticket could not be dispatched",
}


class SparkSubmitRetryOperator(SparkSubmitOperator):
    """Submit a Spark job and, after a failure that may pass, submit it again later, all in one try of the task.

    Each failure is classified. A permanent failure fails the task at once. After any other failure, the operator
    schedules a ticket and defers the task until the ticket is dispatched, without a worker slot or a JVM. While the
    cluster is down, the ticket is extended, which costs no attempt. Expedite the ticket to retry now; cancel it to give
    the task up.

    If a worker is killed, the next try of the task continues where the last one stopped: set ``retries`` to 1 or more.

    :param spark_retries: how often and how soon; see :class:`~airflow_delay_provider.spark.retries.SparkRetries`.
    :param failure_rules: your own rules, tried before the built-in ones.
    :param cluster_check: dotted path of a function that gets ``conn_id`` and returns whether the cluster is up; it
        replaces the health check of the master, ResourceManager or API server.
    :param starvation_timeout: after how long without executors a job is stopped and tried again; None is never.
    :param job_connections: ids of Airflow connections that the job needs, for example ``["delay_default"]``. The task
        looks them up for each attempt and passes them to the driver in the environment of spark-submit, together with
        the configured ledger URL. Not in deploy mode cluster.
    :param delay_conn_id: the connection of the broker that carries tickets.
    :param hold: who holds tickets, ``broker`` or ``ledger``; None is what the connection says.
    :param ticket_channel: where tickets go.
    :param dead_letter_channel: where a message goes when all attempts are used up; None sends none.
    """

    operator_extra_links = (DelayedMessageLink(),)

    def __init__(
        self,
        *,
        spark_retries: SparkRetries | None = None,
        failure_rules: Sequence[Mapping[str, Any]] = (),
        cluster_check: str | None = None,
        starvation_timeout: timedelta | None = timedelta(minutes=10),
        job_connections: Sequence[str] = (),
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        ticket_channel: str = DEFAULT_CHANNEL,
        dead_letter_channel: str | None = DEFAULT_DEAD_LETTER_CHANNEL,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job_connections = check_job_connections(job_connections, deploy_mode=self._deploy_mode)
        self.spark_retries = spark_retries or SparkRetries()
        self.failure_rules = failure_rules
        self.cluster_check = cluster_check
        self.starvation_timeout = starvation_timeout
        self.delay_conn_id = delay_conn_id
        self.hold = hold
        self.ticket_channel = ticket_channel
        self.dead_letter_channel = dead_letter_channel
        #: The URL for the link; None until this process has scheduled a ticket.
        self.message_link: str | None = None
        self._clock = SystemClock()
        self._ticket_id: str | None = None
        self._was_killed = False

    # -- submit, fail, wait, submit again ------------------------------------------------------------------------

    def execute(self, context: Context) -> None:
        """Begin, or continue where an earlier try of this task was killed."""
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
        self._wait_if_cluster_is_down(context, history)
        self._submit(context, history)

    def resume(self, context: Context, event: dict[str, Any]) -> None:
        """Submit again once the ticket was dispatched and admitted."""
        history = self._load(context) or History(began_at=self._clock.now())
        outcome = TicketOutcome(event["outcome"])
        if outcome is not TicketOutcome.GO:
            if outcome is not TicketOutcome.GIVEN_UP:
                self._send_dead_letter(context, history, _WHY_STOPPED[outcome])
            self._stop(context, history, _WHY_STOPPED[outcome])
        with self._open_tickets() as tickets:
            tickets.sweep()
            wait_for_token(tickets.hook, self._cluster())
        self._submit(context, history)

    def _submit(self, context: Context, history: History) -> None:
        if history.phase is not Phase.SUBMITTED:
            history = history.begin_attempt(self._clock.now())
        # Before the submission: if this worker is lost, the next one knows of it.
        self._store(context, history)
        self._hook = hook = self._get_hook()
        try:
            self._run_job(context, hook)
        except Exception as error:
            if self._was_killed:
                # Airflow lets a stopped task run on: do not schedule a ticket for it.
                raise
            if not hook.was_started and not self._is_job_known(context):
                # Nothing was submitted: the task is wrong, not the job.
                self._store(context, history.end(self._clock.now()))
                raise
            evidence = hook.evidence(error)
            classification = classify(evidence, Rules.builtin().extended_by(self.failure_rules))
            history = history.fail_attempt(classification, self._clock.now(), exit_code=evidence.exit_code)
        else:
            self._store(context, history.end(self._clock.now()))
            return
        history = history.wait_until(self._clock.now() + self._delay_or_stop(context, history))
        self._wait(context, history, self._next_ticket(context, history))

    def _delay_or_stop(self, context: Context, history: History) -> timedelta:
        """Return how long to wait after the last failure, or fail the task."""
        decision = decide(history, self.spark_retries, now=self._clock.now(), random=random.random)
        if decision.delay is not None:
            return decision.delay
        if history.last.verdict is not Verdict.PERMANENT:
            self._send_dead_letter(context, history, decision.reason)
        self._stop(context, history, decision.reason)

    def _send_dead_letter(self, context: Context, history: History, reason: str) -> None:
        with self._open_tickets() as tickets:
            tickets.send_dead_letter(origin_of(context), history, reason)

    def _wait(self, context: Context, history: History, ticket: Ticket) -> NoReturn:
        """Schedule the ticket and defer the task until it is dispatched."""
        self._store(context, history)
        self._ticket_id = ticket.id
        with translate_errors(), self._open_tickets() as tickets:
            ticket = ticket.accepted_by(tickets.hook.get_conn().limits, now=self._clock.now())
            since = tickets.schedule(ticket)
        self._log_ticket(context, history, ticket)
        self.defer(
            trigger=RetryTicketTrigger(
                ticket=ticket.as_json(),
                since=since,
                give_up_at=(history.began_at + self.spark_retries.max_elapsed).isoformat(),
                spark_conn_id=self._conn_id,
                cluster_check=self.cluster_check,
                channel=self.ticket_channel,
                delay_conn_id=self.delay_conn_id,
                hold=self.hold,
            ),
            method_name="resume",
        )

    def _stop(self, context: Context, history: History, why: str) -> NoReturn:
        self._store(context, history.end(self._clock.now()))
        self._log_attempts(history)
        if not history.attempts:
            raise AirflowFailException(f"the Spark job was never submitted, as the cluster is down: {why}")
        last = history.last
        # The output of the job stands above in the log.
        raise AirflowFailException(
            f"the Spark job failed at attempt {last.number} ({last.verdict}): {last.reason}; not tried again: {why}"
        ) from None

    def on_kill(self) -> None:
        """Stop the job and its processes, and cancel the ticket."""
        self._was_killed = True
        if self._hook is not None:
            super().on_kill()
        if self._ticket_id is not None:
            with self._open_tickets() as tickets:
                tickets.cancel(self._ticket_id)

    def _open_tickets(self) -> RetryTickets:
        return RetryTickets(
            delay_conn_id=self.delay_conn_id,
            hold=self.hold,
            channel=self.ticket_channel,
            dead_letter_channel=self.dead_letter_channel,
        )

    # -- the job and its cluster ---------------------------------------------------------------------------------

    def _run_job(self, context: Context, hook: GuardedSparkSubmitHook) -> None:
        if self.job_connections:
            hook.check_job_connections(self.job_connections)
            hook.job_environment = find_job_environment(self.job_connections)
        try:
            super().execute(context)
        except Exception as error:
            if not is_unknown_job(error) or not self._is_job_known(context):
                raise
            self.log.warning("The cluster no longer knows the job of an earlier attempt; submitting it again")
            context["task_state_store"].delete(self.external_id_key)
            super().execute(context)

    def _get_hook(self) -> GuardedSparkSubmitHook:
        return GuardedSparkSubmitHook.guarding(super()._get_hook(), starvation_timeout=self.starvation_timeout)

    def _is_job_known(self, context: Context) -> bool:
        """Tell whether an earlier attempt has left a job on the cluster whose status can be read."""
        store = context.get("task_state_store")
        return bool(self.durable and store is not None and store.get(self.external_id_key))

    def _cluster(self) -> ClusterAddress:
        return find_cluster(self._conn_id, check=self.cluster_check)

    def _wait_if_cluster_is_down(self, context: Context, history: History) -> None:
        """Do not submit to a cluster that is known to be down."""
        if history.phase is Phase.SUBMITTED:
            return
        with self._open_tickets() as tickets:
            outage = find_outage(tickets.hook, self._cluster())
        if outage is not None:
            history = history.wait_until(outage.next_check_at)
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

    # -- stored history and log ----------------------------------------------------------------------------------

    def _was_cleared(self, context: Context, history: History) -> bool:
        """Tell whether the stored history is from before a user stopped and cleared the task.

        Airflow also starts a first try again if it could not parse the DAG when the ticket was dispatched: that try
        continues to wait.
        """
        ti = context["ti"]
        if ti.try_number != ti.max_tries - (self.retries or 0) + 1:
            return False
        if history.phase is not Phase.WAITING:
            return True
        with self._open_tickets() as tickets:
            return tickets.is_gone(self._next_ticket(context, history).id)

    def _load(self, context: Context) -> History | None:
        store = context.get("task_state_store")
        stored = None if store is None else store.get(HISTORY_KEY)
        return History.from_json(stored) if isinstance(stored, dict) else None

    def _store(self, context: Context, history: History) -> None:
        store = context.get("task_state_store")
        if store is not None:
            store.set(HISTORY_KEY, as_stored(history, self.spark_retries))

    def _log_ticket(self, context: Context, history: History, ticket: Ticket) -> None:
        self._log_attempts(history)
        self.log.info("Attempt %d is due at %s", ticket.attempt, ticket.deliver_at.isoformat(timespec="seconds"))
        self.message_link = message_url(ticket.id, self.delay_conn_id)
        context["ti"].xcom_push(key=DelayedMessageLink.xcom_key, value=self.message_link)

    def _log_attempts(self, history: History) -> None:
        for line in attempt_table(history):
            self.log.info("%s", line)
