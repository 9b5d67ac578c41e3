"""The tasks of a group of Spark attempts: submit, schedule the next one, and what came of it all."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.hooks.spark import GuardedSparkSubmitHook
from airflow_delay_provider.hooks.spark_cluster import find_cluster
from airflow_delay_provider.hooks.ticket_office import TicketOffice, TicketPlaces
from airflow_delay_provider.operators.message import ScheduleMessageOperator
from airflow_delay_provider.operators.origin import origin_of
from airflow_delay_provider.sensors.spark import TICKET_KEY
from airflow_delay_provider.spark.attempt_table import attempt_table
from airflow_delay_provider.spark.failures import Finding, Rules, Verdict, classify
from airflow_delay_provider.spark.history import History
from airflow_delay_provider.spark.retrying import SparkRetries, decide
from airflow_delay_provider.spark.tickets import Ticket
from airflow_delay_provider.task_groups.attempts import failed_history, pull_history, push_history, states_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class SparkAttemptOperator(SparkSubmitOperator):
    """One submission, which tells those that follow how it failed.

    :param schedule_task_id: the task that scheduled it and knows of the attempts before; None for the first.
    :param failure_rules: rules that are tried before the built-in ones.
    :param starvation_timeout: how long nobody may work on the job before it is ended; None is for ever.
    :param ticket_places: over which broker retries go.
    """

    _hook: GuardedSparkSubmitHook | None

    def __init__(
        self,
        *,
        schedule_task_id: str | None,
        failure_rules: Sequence[Mapping[str, Any]],
        starvation_timeout: timedelta | None,
        ticket_places: TicketPlaces,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.schedule_task_id = schedule_task_id
        self.failure_rules = failure_rules
        self.starvation_timeout = starvation_timeout
        self.ticket_places = ticket_places
        self._clock = SystemClock()
        self._was_killed = False

    def execute(self, context: Context) -> None:
        history = self._begin(context)
        try:
            super().execute(context)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is classified, told and raised
            finding = self._find_cause(context, error)
            exit_code = None if self._hook is None else self._hook.exit_code
            push_history(context, history.fail_attempt(finding, self._clock.now(), exit_code=exit_code))
            # What the job printed stands above in the log.
            raise AirflowFailException(f"the Spark job failed ({finding.verdict}): {finding.reason}") from None
        push_history(context, history.end(self._clock.now()))

    def on_kill(self) -> None:
        self._was_killed = True
        if self._hook is not None:
            super().on_kill()

    def _begin(self, context: Context) -> History:
        history = History(began_at=self._clock.now())
        if self.schedule_task_id is not None:
            history = pull_history(context, self.schedule_task_id) or history
            with TicketOffice(self.ticket_places) as office:
                office.await_turn(find_cluster(self._conn_id))
            if self._was_killed:
                raise AirflowFailException("the task was ended before it submitted its job")
        history = history.begin_attempt(self._clock.now())
        # Before the submission: should this worker be gone, the next attempt knows of it.
        push_history(context, history)
        return history

    def _find_cause(self, context: Context, error: Exception) -> Finding:
        # A worker that is shut down ends its tasks too, but not for good: to Airflow they still run.
        if self._was_killed and states_of(context, [self.task_id])[self.task_id] != "running":
            return _permanent("ended-by-user", "the task was ended")
        if self._hook is None or not self._hook.was_started:
            return _permanent("not-submitted", f"nothing was submitted, the task is wrong: {_one_line(error)}")
        return classify(self._hook.evidence(error), Rules.builtin().extended_by(self.failure_rules))

    def _get_hook(self) -> GuardedSparkSubmitHook:
        return GuardedSparkSubmitHook.guarding(super()._get_hook(), starvation_timeout=self.starvation_timeout)


class ScheduleRetryOperator(ScheduleMessageOperator):
    """Schedule the message that brings the next attempt, or be skipped where the failure is final.

    Its id derives from this task and the attempt that failed, so a retried task schedules nothing twice, and one that
    was cleared with the attempt begins a new wait.

    :param attempt_task_id: the attempt that has failed.
    :param spark_conn_id: its cluster.
    :param spark_retries: how often and how soon.
    """

    template_fields: Sequence[str] = (*ScheduleMessageOperator.template_fields, "spark_conn_id")

    def __init__(self, *, attempt_task_id: str, spark_conn_id: str, spark_retries: SparkRetries, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attempt_task_id = attempt_task_id
        self.spark_conn_id = spark_conn_id
        self.spark_retries = spark_retries

    def execute(self, context: Context) -> str | list[str]:
        if states_of(context, [self.attempt_task_id])[self.attempt_task_id] != "failed":
            raise AirflowSkipException("the attempt before was not made")
        now = SystemClock().now()
        history = failed_history(context, self.attempt_task_id, now=now)
        decision = decide(history, self.spark_retries, now=now, random=random.random)
        if decision.delay is None:
            raise AirflowSkipException(f"{_describe(history)}; not tried again: {decision.reason}")
        ticket = Ticket(
            origin=origin_of(context),
            began_at=history.last.started_at,
            attempt=history.last.number + 1,
            verdict=history.last.verdict or "",
            reason=history.last.reason,
            cluster=find_cluster(self.spark_conn_id).name,
            deliver_at=now + decision.delay,
        )
        self.message_id, self.payload, self.deliver_at = ticket.id, ticket.as_json(), ticket.deliver_at
        push_history(context, history)
        context["ti"].xcom_push(key=TICKET_KEY, value=ticket.as_json())
        return super().execute(context)


class SparkOutcomeOperator(BaseOperator):
    """Succeed when one attempt has succeeded, and return its number; fail with the reason in one line otherwise.

    :param attempt_task_ids: the attempts, in order.
    :param spark_retries: how often they were to be made.
    """

    def __init__(self, *, attempt_task_ids: Sequence[str], spark_retries: SparkRetries, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attempt_task_ids = attempt_task_ids
        self.spark_retries = spark_retries

    def execute(self, context: Context) -> int:
        states = states_of(context, self.attempt_task_ids)
        made = [task_id for task_id in self.attempt_task_ids if states[task_id] in ("success", "failed")]
        if not made:
            self._pass_on(states)
        last = made[-1]
        number = self.attempt_task_ids.index(last) + 1
        if states[last] == "success":
            self._tell(pull_history(context, last))
            self.log.info("Attempt %d has succeeded", number)
            return number
        now = SystemClock().now()
        history = failed_history(context, last, now=now)
        self._tell(history)
        decision = decide(history, self.spark_retries, now=now, random=random.random)
        raise AirflowFailException(
            f"{_describe(history)}; not tried again: {decision.reason or self._why_ended(number)}"
        )

    def _pass_on(self, states: Mapping[str, str | None]) -> NoReturn:
        if set(states.values()) == {"skipped"}:
            raise AirflowSkipException("the Spark job was not to be submitted: its first attempt is skipped")
        raise AirflowFailException("the Spark job was never submitted: a task before it failed")

    def _why_ended(self, number: int) -> str:
        if number == len(self.attempt_task_ids):
            return f"all {number} attempts are used up"
        return f"attempt {number + 1} was given up or could not be scheduled, which the log of the task before it tells"

    def _tell(self, history: History | None) -> None:
        for line in attempt_table(history) if history is not None else ():
            self.log.info("%s", line)


def _describe(history: History) -> str:
    last = history.last
    return f"the Spark job failed at attempt {last.number} ({last.verdict}): {last.reason}"


def _permanent(rule: str, reason: str) -> Finding:
    return Finding(verdict=Verdict.PERMANENT, rule=rule, line="", reason=reason)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
