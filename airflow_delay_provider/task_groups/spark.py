"""Spark attempts as tasks of their own, each visible in the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import TaskGroup, TriggerRule

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.ticket_office import TicketPlaces
from airflow_delay_provider.sensors.spark import DelayedRetrySensor
from airflow_delay_provider.spark.retrying import SparkRetries
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL
from airflow_delay_provider.task_groups.spark_attempts import (
    ScheduleRetryOperator,
    SparkAttemptOperator,
    SparkOutcomeOperator,
)

#: More tasks than this are no longer looked at in a grid; SparkSubmitRetryOperator has no such limit.
MAX_ATTEMPTS = 10


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

    A failure that may pass schedules a message, for which a deferred sensor waits; then comes the next attempt. After
    success and after a permanent failure the rest is skipped. ``outcome`` succeeds when one attempt has, whatever the
    ones before did, and is what tasks after the group depend on.

    :param group_id: name of the group.
    :param attempts: submissions in all, of which each is a task.
    :param backoff: the delays; None is 15-30, 15-60, 15-120 ... up to 15-900 seconds.
    :param failure_rules: rules that are tried before the built-in ones.
    :param starvation_timeout: how long nobody may work on a job before it is ended; None is for ever.
    :param conn_id: the connection of the cluster.
    :param delay_conn_id: the connection of the broker that carries retries.
    :param hold: who keeps their wait; None is what the connection says.
    :param ticket_channel: where they go.
    :param spark_submit_arguments: those of ``SparkSubmitOperator``, for each attempt.
    """
    if not isinstance(attempts, int) or not 1 <= attempts <= MAX_ATTEMPTS:
        raise ConfigurationError(
            f"attempts: {attempts!r} is not a number of tasks; use 1 to {MAX_ATTEMPTS}, or SparkSubmitRetryOperator"
        )
    retries = SparkRetries(max_attempts=attempts, backoff=backoff or SparkRetries().backoff)
    over: dict[str, Any] = {"delay_conn_id": delay_conn_id, "hold": hold, "channel": ticket_channel}
    patience = retries.max_elapsed.total_seconds()
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
                    **over,
                )
            submit = SparkAttemptOperator(
                task_id=f"submit_{number}",
                schedule_task_id=None if schedule is None else schedule.task_id,
                failure_rules=failure_rules,
                starvation_timeout=starvation_timeout,
                ticket_places=TicketPlaces(**over),
                conn_id=conn_id,
                **spark_submit_arguments,
            )
            if schedule is not None:
                wait = DelayedRetrySensor(task_id=f"wait_{number}", spark_conn_id=conn_id, timeout=patience, **over)
                submissions[-1] >> schedule >> wait >> submit
            submissions.append(submit)
        submissions >> SparkOutcomeOperator(
            task_id="outcome",
            attempt_task_ids=[each.task_id for each in submissions],
            spark_retries=retries,
            trigger_rule=TriggerRule.ALL_DONE,
        )
    return group
