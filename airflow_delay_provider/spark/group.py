"""A task group in which each submission of a Spark job is a task of its own, visible in the grid."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseOperator, TaskGroup, TriggerRule
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.task import origin_of
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.sensors.spark import TICKET_KEY, DelayedRetrySensor
from airflow_delay_provider.spark.admission import wait_for_token
from airflow_delay_provider.spark.cluster.address import find_cluster
from airflow_delay_provider.spark.failures import Classification, Rules, Verdict, classify
from airflow_delay_provider.spark.process.submit import GuardedSparkSubmitHook
from airflow_delay_provider.spark.retries import WORKER_LOST, History, Phase, SparkRetries, attempt_table, decide
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, RetryTickets, Ticket

if TYPE_CHECKING:
    from datetime import datetime

    from airflow.sdk import Context

#: A grid with more tasks is hard to read; SparkSubmitRetryOperator has no such limit.
MAX_ATTEMPTS = 10
#: Of the XCom in which an attempt passes on its history and that of the attempts before.
HISTORY_XCOM_KEY = "spark_attempts"
#: Airflow marks a task as failed when a user stops it; the task pushes its history some seconds later.
LATE_HISTORY_SECONDS = 20.0


def spark_submit_with_retries(
    group_id: str,
    *,
    attempts: int = 3,
    backoff: Backoff | None = None,
    failure_rules: Sequence[Mapping[str, Any]] = (),
    starvation_timeout: timedelta | None = timedelta(minutes=10),
    conn_id: str = "spark_default",
    delay_conn_id: str = DEFAULT_CONN_ID,
    hold: str | None = None,
    ticket_channel: str = DEFAULT_CHANNEL,
    **spark_submit_arguments: Any,
) -> TaskGroup:
    """Return a group submit_1 -> schedule_2 -> wait_2 -> submit_2 -> ... -> outcome.

    After a failure that may pass, ``schedule_N`` schedules a message and the deferred sensor ``wait_N`` waits for it.
    After success and after a permanent failure the remaining tasks are skipped. ``outcome`` succeeds if any attempt
    has succeeded; let tasks after the group depend on it.

    :param group_id: name of the group.
    :param attempts: number of submissions, each of which is a task.
    :param backoff: the delays; None is 15-30, 15-60, 15-120 ... up to 15-900 seconds.
    :param failure_rules: your own rules, tried before the built-in ones.
    :param starvation_timeout: after how long without executors a job is stopped; None is never.
    :param conn_id: the connection of the cluster.
    :param delay_conn_id: the connection of the broker that carries retries.
    :param hold: who holds them, ``broker`` or ``ledger``; None is what the connection says.
    :param ticket_channel: where they go.
    :param spark_submit_arguments: those of ``SparkSubmitOperator``, for each attempt.
    """
    if not isinstance(attempts, int) or not 1 <= attempts <= MAX_ATTEMPTS:
        raise ConfigurationError(
            f"attempts: {attempts!r} is not a number of tasks; use 1 to {MAX_ATTEMPTS}, or SparkSubmitRetryOperator"
        )
    retries = SparkRetries(max_attempts=attempts, backoff=backoff or SparkRetries().backoff)
    broker: dict[str, Any] = {"delay_conn_id": delay_conn_id, "hold": hold}
    timeout = retries.max_elapsed.total_seconds()
    submissions: list[SparkAttemptOperator] = []
    with TaskGroup(group_id) as group:
        for number in range(1, attempts + 1):
            schedule = None
            if submissions:
                schedule = ScheduleRetryOperator(
                    task_id=f"schedule_{number}",
                    attempt_task_id=submissions[-1].task_id,
                    spark_conn_id=conn_id,
                    spark_retries=retries,
                    trigger_rule=TriggerRule.ALL_FAILED,
                    channel=ticket_channel,
                    **broker,
                )
            submit = SparkAttemptOperator(
                task_id=f"submit_{number}",
                schedule_task_id=None if schedule is None else schedule.task_id,
                failure_rules=failure_rules,
                starvation_timeout=starvation_timeout,
                conn_id=conn_id,
                **broker,
                **spark_submit_arguments,
            )
            if schedule is not None:
                wait = DelayedRetrySensor(
                    task_id=f"wait_{number}", spark_conn_id=conn_id, timeout=timeout, channel=ticket_channel, **broker
                )
                submissions[-1] >> schedule >> wait >> submit
            submissions.append(submit)
        submissions >> SparkOutcomeOperator(
            task_id="outcome",
            attempt_task_ids=[each.task_id for each in submissions],
            spark_retries=retries,
            trigger_rule=TriggerRule.ALL_DONE,
        )
    return group


# -- the tasks -----------------------------------------------------------------------------------------------------


class SparkAttemptOperator(SparkSubmitOperator):
    """One submission; it pushes its history for the tasks that follow.

    :param schedule_task_id: the task that scheduled this attempt and has the history before it; None for the first.
    :param failure_rules: your own rules, tried before the built-in ones.
    :param starvation_timeout: after how long without executors the job is stopped; None is never.
    :param delay_conn_id: the connection whose ledger paces submissions.
    :param hold: who holds retries, ``broker`` or ``ledger``; None is what the connection says.
    """

    _hook: GuardedSparkSubmitHook | None

    def __init__(
        self,
        *,
        schedule_task_id: str | None,
        failure_rules: Sequence[Mapping[str, Any]],
        starvation_timeout: timedelta | None,
        delay_conn_id: str,
        hold: str | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.schedule_task_id = schedule_task_id
        self.failure_rules = failure_rules
        self.starvation_timeout = starvation_timeout
        self.delay_conn_id = delay_conn_id
        self.hold = hold
        self._clock = SystemClock()
        self._was_killed = False

    def execute(self, context: Context) -> None:
        history = self._begin(context)
        try:
            super().execute(context)
        except Exception as error:  # noqa: BLE001 - every failure is classified, pushed and raised
            cause = self._find_cause(context, error)
            exit_code = None if self._hook is None else self._hook.exit_code
            _push_history(context, history.fail_attempt(cause, self._clock.now(), exit_code=exit_code))
            # The output of the job stands above in the log.
            raise AirflowFailException(f"the Spark job failed ({cause.verdict}): {cause.reason}") from None
        _push_history(context, history.end(self._clock.now()))

    def on_kill(self) -> None:
        self._was_killed = True
        if self._hook is not None:
            super().on_kill()

    def _begin(self, context: Context) -> History:
        history = History(began_at=self._clock.now())
        if self.schedule_task_id is not None:
            history = _pull_history(context, self.schedule_task_id) or history
            with RetryTickets(delay_conn_id=self.delay_conn_id, hold=self.hold) as tickets:
                wait_for_token(tickets.hook, find_cluster(self._conn_id))
            if self._was_killed:
                raise AirflowFailException("the task was stopped before it submitted its job")
        history = history.begin_attempt(self._clock.now())
        # Before the submission: if this worker is lost, the next attempt knows of it.
        _push_history(context, history)
        return history

    def _find_cause(self, context: Context, error: Exception) -> Classification:
        # A worker that shuts down kills its tasks too, but Airflow runs them again: their state is still "running".
        if self._was_killed and states_of(context, [self.task_id])[self.task_id] != "running":
            return _permanent("ended-by-user", "the task was stopped")
        if self._hook is None or not self._hook.was_started:
            return _permanent("not-submitted", f"nothing was submitted, the task is wrong: {_one_line(error)}")
        return classify(self._hook.evidence(error), Rules.builtin().extended_by(self.failure_rules))

    def _get_hook(self) -> GuardedSparkSubmitHook:
        return GuardedSparkSubmitHook.guarding(super()._get_hook(), starvation_timeout=self.starvation_timeout)


class ScheduleRetryOperator(ScheduleMessageOperator):
    """Schedule the message that releases the next attempt, or be skipped if the failure is final.

    The id derives from this task and the failed attempt, so a retried task schedules nothing twice, and a task that
    was cleared together with the attempt begins a new wait.

    :param attempt_task_id: the attempt that has failed.
    :param spark_conn_id: its cluster.
    :param spark_retries: how often and how soon.
    """

    template_fields: Sequence[str] = (*ScheduleMessageOperator.template_fields, "spark_conn_id")

    def __init__(self, *, attempt_task_id: str, spark_conn_id: str, spark_retries: SparkRetries, **kwargs: Any) -> None:
        super().__init__(payload=None, **kwargs)
        self.attempt_task_id = attempt_task_id
        self.spark_conn_id = spark_conn_id
        self.spark_retries = spark_retries

    def execute(self, context: Context) -> str | list[str]:
        if states_of(context, [self.attempt_task_id])[self.attempt_task_id] != "failed":
            raise AirflowSkipException("the attempt before was not made")
        now = SystemClock().now()
        history = _failed_history(context, self.attempt_task_id, now=now)
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
        _push_history(context, history)
        context["ti"].xcom_push(key=TICKET_KEY, value=ticket.as_json())
        return super().execute(context)


class SparkOutcomeOperator(BaseOperator):
    """Return the number of the attempt that has succeeded, or fail with the reason in one line.

    :param attempt_task_ids: the attempts, in order.
    :param spark_retries: how often they may be made.
    """

    def __init__(self, *, attempt_task_ids: Sequence[str], spark_retries: SparkRetries, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attempt_task_ids = attempt_task_ids
        self.spark_retries = spark_retries

    def execute(self, context: Context) -> int:
        states = states_of(context, self.attempt_task_ids)
        made = [task_id for task_id in self.attempt_task_ids if states[task_id] in ("success", "failed")]
        if not made:
            _raise_not_submitted(states)
        last = made[-1]
        number = self.attempt_task_ids.index(last) + 1
        if states[last] == "success":
            self._log_attempts(_pull_history(context, last))
            self.log.info("Attempt %d has succeeded", number)
            return number
        now = SystemClock().now()
        history = _failed_history(context, last, now=now)
        self._log_attempts(history)
        decision = decide(history, self.spark_retries, now=now, random=random.random)
        raise AirflowFailException(
            f"{_describe(history)}; not tried again: {decision.reason or self._why_stopped(number)}"
        )

    def _why_stopped(self, number: int) -> str:
        if number == len(self.attempt_task_ids):
            return f"all {number} attempts are used up"
        return f"attempt {number + 1} was given up or could not be scheduled; see the log of the task before it"

    def _log_attempts(self, history: History | None) -> None:
        for line in attempt_table(history) if history is not None else ():
            self.log.info("%s", line)


# -- what the tasks pass to each other -----------------------------------------------------------------------------


def states_of(context: Context, task_ids: Sequence[str]) -> dict[str, str | None]:
    """Return the state of each task in this run, as Airflow knows it."""
    ti: Any = context["ti"]
    map_index = ti.map_index if ti.map_index is not None and ti.map_index >= 0 else None
    by_run = ti.get_task_states(dag_id=ti.dag_id, task_ids=list(task_ids), run_ids=[ti.run_id], map_index=map_index)
    states = by_run.get(ti.run_id, {})
    # Airflow adds the index to the names of mapped tasks.
    suffix = "" if map_index is None else f"_{map_index}"
    return {task_id: states.get(f"{task_id}{suffix}") for task_id in task_ids}


def _push_history(context: Context, history: History) -> None:
    context["ti"].xcom_push(key=HISTORY_XCOM_KEY, value=history.as_json())


def _pull_history(context: Context, task_id: str) -> History | None:
    stored = context["ti"].xcom_pull(task_ids=task_id, key=HISTORY_XCOM_KEY)
    return History.from_json(stored) if isinstance(stored, dict) else None


def _failed_history(context: Context, task_id: str, *, now: datetime) -> History:
    """Return the history up to a failed attempt; fill in the failure if the attempt's worker was lost."""
    deadline = time.monotonic() + LATE_HISTORY_SECONDS
    history = _pull_history(context, task_id)
    while history is not None and history.phase is Phase.SUBMITTED and time.monotonic() < deadline:
        time.sleep(1)
        history = _pull_history(context, task_id)
    history = history or History(began_at=now).begin_attempt(now)
    return history.fail_attempt(WORKER_LOST, now) if history.phase is Phase.SUBMITTED else history


def _raise_not_submitted(states: Mapping[str, str | None]) -> NoReturn:
    if set(states.values()) == {"skipped"}:
        raise AirflowSkipException("the Spark job was not to be submitted: its first attempt is skipped")
    raise AirflowFailException("the Spark job was never submitted: a task before it failed")


def _describe(history: History) -> str:
    last = history.last
    return f"the Spark job failed at attempt {last.number} ({last.verdict}): {last.reason}"


def _permanent(rule: str, reason: str) -> Classification:
    return Classification(verdict=Verdict.PERMANENT, rule=rule, line="", reason=reason)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
