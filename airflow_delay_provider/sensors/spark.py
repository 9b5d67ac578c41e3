"""The sensor that waits for a Spark retry."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_delay_provider.domain.lifecycle import FROM_THE_START
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, RetryTickets
from airflow_delay_provider.triggers.spark import RetryTicketTrigger, TicketOutcome

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Of the XCom in which the task that schedules a retry passes on the ticket.
TICKET_KEY = "spark_retry_ticket"
_FAILURES = {
    TicketOutcome.GIVEN_UP: "the retry was given up: its message was cancelled",
    TicketOutcome.EXPIRED: "the cluster is down, and this sensor times out before the next check",
    TicketOutcome.LOST: "the message of the retry could not be dispatched",
}


class DelayedRetrySensor(BaseSensorOperator):
    """Wait, deferred, until the retry scheduled by the previous task is due and the cluster can take the job.

    The sensor succeeds when the message was dispatched, at once if you expedite it. While the cluster is down or its
    token bucket is empty, the message is scheduled again for later. If you cancel the message, the sensor fails.

    :param spark_conn_id: the connection of the cluster (templated).
    :param cluster_check: dotted path of a function that gets ``spark_conn_id`` and returns whether the cluster is up.
    :param channel: where retries are scheduled to (templated, as the next two).
    :param delay_conn_id: the connection of their broker.
    :param hold: who holds them, ``broker`` or ``ledger``, as when they were scheduled.
    """

    template_fields: Sequence[str] = ("spark_conn_id", "channel", "delay_conn_id", "hold")

    def __init__(
        self,
        *,
        spark_conn_id: str = "spark_default",
        cluster_check: str | None = None,
        channel: str = DEFAULT_CHANNEL,
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spark_conn_id = spark_conn_id
        self.cluster_check = cluster_check
        self.channel = channel
        self.delay_conn_id = delay_conn_id
        self.hold = hold

    def execute(self, context: Context) -> NoReturn:
        patience = timedelta(seconds=self.timeout)
        self.defer(
            trigger=RetryTicketTrigger(
                ticket=self._find_ticket(context),
                since=FROM_THE_START,
                give_up_at=(datetime.now(UTC) + patience).isoformat(),
                spark_conn_id=self.spark_conn_id,
                cluster_check=self.cluster_check,
                channel=self.channel,
                delay_conn_id=self.delay_conn_id,
                hold=self.hold,
            ),
            method_name="execute_complete",
            timeout=patience,
        )

    def execute_complete(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Succeed when the job may be submitted."""
        outcome = TicketOutcome(event["outcome"])
        if outcome is not TicketOutcome.GO:
            raise AirflowFailException(_FAILURES[outcome])
        with RetryTickets(delay_conn_id=self.delay_conn_id, hold=self.hold, channel=self.channel) as tickets:
            tickets.sweep()
        self.log.info("The job may be submitted again")

    def _find_ticket(self, context: Context) -> dict[str, Any]:
        for task_id in sorted(self.upstream_task_ids):
            ticket = context["ti"].xcom_pull(task_ids=task_id, key=TICKET_KEY)
            if isinstance(ticket, dict):
                return ticket
        raise AirflowFailException(
            "no task before this one has scheduled a retry: put a ScheduleRetryOperator before it, or wait for another"
            " message with MessageDispatchedSensor"
        )
