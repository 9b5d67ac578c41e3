"""The trigger of Spark tasks that wait for their next submission."""

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
from airflow_delay_provider.hooks.ticket_office import TicketOffice, TicketPlaces
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, Ticket, WaitsFor
from airflow_delay_provider.triggers.journal import JournalTail
from airflow_delay_provider.triggers.retry_desk import Place, RetryDesk
from airflow_delay_provider.triggers.settling import let_deferral_settle
from airflow_delay_provider.triggers.warning import warning_of_dispatchers


class TicketEnd(StrEnum):
    """How a wait ended."""

    GO = "go"
    #: Somebody cancelled the ticket.
    GIVEN_UP = "given_up"
    #: The cluster stayed down for longer than the task may take.
    EXPIRED = "expired"
    #: The broker could not dispatch the ticket.
    LOST = "lost"


class RetryTicketTrigger(BaseTrigger):
    """Fires when the ticket was dispatched and the cluster can take the job, or when there is no more to wait for.

    While the cluster is down, or others are first, the ticket is extended. No connection of its own: all tickets of a
    triggerer share one journal tail and one desk. Its arguments are stored in plain text by Airflow and hold no secret.

    :param ticket: the ticket, as JSON data.
    :param since: journal position from before it was scheduled.
    :param give_up_at: no submission begins later (ISO-8601).
    :param spark_conn_id: the connection of the cluster.
    :param cluster_check: dotted path of a function that gets ``spark_conn_id`` and says whether the cluster is up.
    :param channel: where tickets go.
    :param delay_conn_id: the connection of the broker.
    :param hold: who keeps the wait; None is what the connection says.
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
            RetryDesk.shared(self.delay_conn_id, hold=self.hold) as desk,
        ):
            async with warning_of_dispatchers(tail, self):
                end = await self._wait(tail, desk)
        await let_deferral_settle(self, began=began)
        yield TriggerEvent(  # type: ignore[no-untyped-call]  # Airflow leaves it untyped
            {"end": end.value, "extensions": self._current.extension}
        )

    async def on_kill(self) -> None:
        """Take the ticket back: nobody waits for it any more."""
        cancelled = await asyncio.to_thread(self._cancel)
        self.log.info("The task was ended: its ticket %s", "is cancelled" if cancelled else "comes for nobody")

    async def _wait(self, tail: JournalTail, desk: RetryDesk) -> TicketEnd:
        place = Place(spark_conn_id=self.spark_conn_id, check=self.cluster_check, channel=self.channel)
        since = self.since
        while True:
            entry = (await tail.outcomes([self._current.id], since=since))[self._current.id]
            if entry.change is not Change.DISPATCHED:
                self.log.info("The ticket was %s", entry.change.value)
                return TicketEnd.GIVEN_UP if entry.change is Change.CANCELLED else TicketEnd.LOST
            extension = await desk.show(self._current, place)
            if extension is None:
                return TicketEnd.GO
            self._current, since = extension.ticket, extension.since
            self.log.info(
                "%s: the next look is at %s",
                "The cluster is down" if self._current.waits_for is WaitsFor.CLUSTER else "Others are first",
                self._current.deliver_at.isoformat(),
            )
            if self._current.deliver_at > datetime.fromisoformat(self.give_up_at):
                await asyncio.to_thread(self._cancel)
                return TicketEnd.EXPIRED

    def _cancel(self) -> bool:
        with TicketOffice(TicketPlaces(delay_conn_id=self.delay_conn_id, hold=self.hold)) as office:
            return office.cancel(self._current.id)
