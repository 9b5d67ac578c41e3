"""The embedded broker and its dispatcher in one object, on a settable clock."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select

from airflow_delay_provider.brokers.consumer import Consumed, Consumer, ConsumerConfig, Handler
from airflow_delay_provider.brokers.ledger import delivery, heartbeats, listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.heartbeats import process_name, this_machine
from airflow_delay_provider.brokers.ledger.records import MESSAGE_COLUMNS, MessageRecord, message_of
from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.brokers.port import Closeable
from airflow_delay_provider.domain.arguments import Limits, OnConflict, compose_message, parse_choice
from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock

_BATCH = 1000
_MESSAGE = scheduled_message.c
_WAITS = _MESSAGE.state == State.SCHEDULED.value


class DelayTestKit(Closeable):
    """Schedules, dispatches and consumes messages without waiting.

    The same embedded broker that runs in production, on a settable clock and without another dispatcher.

    :param url: the ledger database; by default a fresh one in memory, which only one thread may use.
    """

    def __init__(
        self, url: str = "sqlite://", *, clock: SettableClock | None = None, limits: Limits | None = None
    ) -> None:
        self.url = url
        self.clock = clock or SettableClock()
        self.broker = EmbeddedBroker(Ledger(url), limits=limits, clock=self.clock)
        # The kit is the dispatcher, so tasks under test must not warn that none runs.
        self.broker.ledger.transact(heartbeats.beat, _heartbeat())

    def schedule(
        self, channel: str, payload: Any = b"", *, on_conflict: OnConflict | str = OnConflict.KEEP, **options: Any
    ) -> str:
        """Schedule one message and return its id; ``options`` are those of the hook's ``compose``."""
        message = compose_message(channel, payload, now=self.clock.now(), **options)
        self.broker.schedule([message], on_conflict=parse_choice("on_conflict", OnConflict, on_conflict))
        return message.id

    def advance(self, delta: timedelta) -> int:
        """Move time forward, dispatch the messages that become due, and return how many.

        The clock stops at every due time, so each message is dispatched in order and exactly when it is due.
        """
        target = self.clock.now() + delta
        dispatched = self.dispatch()
        while (due := self._next_due()) is not None and due <= target:
            self.clock.set(due)
            dispatched += self.dispatch()
        self.clock.set(target)
        return dispatched

    def dispatch(self) -> int:
        """Dispatch the messages that are due now, without moving time, and return how many."""
        now_ms, dispatched = floor_ms(self.clock.now()), 0
        while moved := self.broker.ledger.transact(delivery.deliver_due, now_ms=now_ms, limit=_BATCH):
            dispatched += len(moved)
        return dispatched

    def received(self, channel: str) -> list[Message]:
        """Return the messages in ``channel``, in order, and leave them there."""
        return self.broker.peek(channel, limit=sys.maxsize)

    def consume(self, channel: str, handler: Handler, *, config: ConsumerConfig | None = None) -> Consumed:
        """Handle the messages in ``channel`` with ``handler``, as the hook's ``consume`` does."""
        return Consumer(self.broker, channel, handler, config=config).run_once()

    def scheduled(self) -> list[Message]:
        """Return the scheduled messages, in due order."""
        waiting = select(*MESSAGE_COLUMNS).where(_WAITS).order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
        with self.broker.ledger.read() as connection:
            return [message_of(row) for row in connection.execute(waiting)]

    def record(self, message_id: str) -> MessageRecord:
        """Return the record of one message: its state, when it was dispatched, how late."""
        with self.broker.ledger.read() as connection:
            return listing.get(connection, message_id)

    def close(self) -> None:
        """Close the database."""
        self.broker.close()

    def _next_due(self) -> datetime | None:
        with self.broker.ledger.read() as connection:
            due_ms = delivery.next_due_ms(connection)
        return None if due_ms is None else from_ms(due_ms)


def _heartbeat() -> heartbeats.Heartbeat:
    return heartbeats.Heartbeat(
        owner=process_name(), machine=this_machine(), pid=os.getpid(), version="test kit", loops={}
    )
