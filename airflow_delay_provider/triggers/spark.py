"""The trigger for which Spark tasks are deferred until their next submission."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime
from enum import StrEnum
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.spark.admission import RetryAdmission, RetryTarget
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, RetryTickets, Ticket, WaitsFor
from airflow_delay_provider.triggers.broker_thread import pause_after_deferral
from airflow_delay_provider.triggers.journal_tail import JournalTail, warn_while_not_dispatched


class TicketOutcome(StrEnum):
    """How the wait for a ticket ended."""

    #: The job may be submitted.
    GO = "go"
    #: A user cancelled the ticket.
    GIVEN_UP = "given_up"
    #: The cluster stayed down for longer than the task may take.
    EXPIRED = "expired"
    #: The broker could not dispatch the ticket.
    LOST = "lost"


class RetryTicketTrigger(BaseTrigger):
    """Fires when the ticket was dispatched and the cluster can take the job, or when the wait has failed.

    While the cluster is down or its token bucket is empty, the ticket is extended. All triggers of a triggerer share
    one journal tail and one admission per connection. Airflow stores the arguments in plain text; they hold no secret.

    :param ticket: the ticket, as JSON data.
    :param since: journal position from before it was scheduled.
    :param give_up_at: no submission begins later (ISO-8601).
    :param spark_conn_id: the connection of the cluster.
    :param cluster_check: dotted path of a function that gets ``spark_conn_id`` and says whether the cluster is up.
    :param channel: where tickets go.
    :param delay_conn_id: the connection of the broker.
    :param hold: who holds the ticket, ``broker`` or ``ledger``; None is what the connection says.
    """

    def __init__(
        self,
        *,
        ticket: dict[str, Any],
        since: str,
        give_up_at: str,
        spark_conn_id: str,
        cluster_check: str | None = None,
        channel: str = DEFAULT_CHANNEL,
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow leaves it untyped
        self.ticket = ticket
        self.since = since
        self.give_up_at = give_up_at
        self.spark_conn_id = spark_conn_id
        self.cluster_check = cluster_check
        self.channel = channel
        self.delay_conn_id = delay_conn_id
        self.hold = hold
        self._current = Ticket.from_json(ticket)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", {
            "ticket": self.ticket,
            "since": self.since,
            "give_up_at": self.give_up_at,
            "spark_conn_id": self.spark_conn_id,
            "cluster_check": self.cluster_check,
            "channel": self.channel,
            "delay_conn_id": self.delay_conn_id,
            "hold": self.hold,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        began = time.monotonic()
        with (
            JournalTail.shared(self.delay_conn_id, hold=self.hold) as tail,
            RetryAdmission.shared(self.delay_conn_id, hold=self.hold) as admission,
        ):
            async with warn_while_not_dispatched(tail, self):
                outcome = await self._wait(tail, admission)
        await pause_after_deferral(self, began=began)
        yield TriggerEvent(  # type: ignore[no-untyped-call]  # Airflow leaves it untyped
            {"outcome": outcome.value, "extensions": self._current.extension}
        )

    async def on_kill(self) -> None:
        """Cancel the ticket, because the task no longer waits for it."""
        cancelled = await asyncio.to_thread(self._cancel)
        result = "is cancelled" if cancelled else "is still dispatched, and ignored"
        self.log.info("The task was stopped: its ticket %s", result)

    async def _wait(self, tail: JournalTail, admission: RetryAdmission) -> TicketOutcome:
        target = RetryTarget(spark_conn_id=self.spark_conn_id, check=self.cluster_check, channel=self.channel)
        since = self.since
        while True:
            entry = (await tail.outcomes([self._current.id], since=since))[self._current.id]
            if entry.change is not Change.DISPATCHED:
                self.log.info("The ticket was %s", entry.change.value)
                return TicketOutcome.GIVEN_UP if entry.change is Change.CANCELLED else TicketOutcome.LOST
            extension = await admission.admit(self._current, target)
            if extension is None:
                return TicketOutcome.GO
            self._current, since = extension.ticket, extension.since
            self.log.info(
                "%s: the ticket is extended to %s",
                "The cluster is down"
                if self._current.waits_for is WaitsFor.CLUSTER
                else "Submissions to the cluster are rate-limited",
                self._current.deliver_at.isoformat(),
            )
            if self._current.deliver_at > datetime.fromisoformat(self.give_up_at):
                await asyncio.to_thread(self._cancel)
                return TicketOutcome.EXPIRED

    def _cancel(self) -> bool:
        with RetryTickets(delay_conn_id=self.delay_conn_id, hold=self.hold) as tickets:
            return tickets.cancel(self._current.id)
