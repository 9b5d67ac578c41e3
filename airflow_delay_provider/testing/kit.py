"""The embedded broker and its dispatcher in one object, on a clock that is set."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

from sqlalchemy import select

from airflow_delay_provider.brokers.consumer import Consumed, Consumer, ConsumerConfig, Handler
from airflow_delay_provider.brokers.embedded import EmbeddedBroker
from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.domain.schedule import Limits, OnConflict, compose_message, parse_choice
from airflow_delay_provider.ledger import delivery, heartbeats, listing
from airflow_delay_provider.ledger.database import Ledger
from airflow_delay_provider.ledger.machine import this_machine
from airflow_delay_provider.ledger.records import MESSAGE_COLUMNS, MessageRecord, message_of
from airflow_delay_provider.ledger.tables import scheduled_message
from airflow_delay_provider.testing.clock import SettableClock

_BATCH = 1000
_MESSAGE = scheduled_message.c
_WAITS = _MESSAGE.state == State.SCHEDULED.value


class DelayTestKit:
    """Everything a test needs to let messages wait and arrive without waiting.

    The same embedded broker that runs in production, on a settable clock, with nobody else dispatching.

    :param url: the ledger database; by default a fresh one in memory, which only one thread may use.
    """

    def __init__(
        self, url: str = "sqlite://", *, clock: SettableClock | None = None, limits: Limits | None = None
    ) -> None:
        self.url = url
        self.clock = clock or SettableClock()
        self.broker = EmbeddedBroker(Ledger(url), limits=limits, clock=self.clock)
        # Tasks under test must not warn that no dispatcher runs: the kit is the dispatcher.
        self.broker.ledger.transact(lambda connection: heartbeats.beat(connection, _heartbeat()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def schedule(
        self, channel: str, payload: Any = b"", *, on_conflict: OnConflict | str = OnConflict.KEEP, **options: Any
    ) -> str:
        """Schedule one message and return its id; ``options`` are those of the hook's ``compose``."""
        message = compose_message(channel, payload, now=self.clock.now(), **options)
        self.broker.schedule([message], on_conflict=parse_choice("on_conflict", OnConflict, on_conflict))
        return message.id

    def advance(self, delta: timedelta) -> int:
        """Move time forward, dispatch what becomes due on the way, and return how many messages that were.

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
        """Dispatch what is due now without moving time, and return how many messages that were."""
        now_ms, dispatched = floor_ms(self.clock.now()), 0
        while moved := self.broker.ledger.transact(
            lambda connection: len(delivery.deliver_due(connection, now_ms=now_ms, limit=_BATCH))
        ):
            dispatched += moved
        return dispatched

    def received(self, channel: str) -> list[Message]:
        """Return what lies in ``channel`` for its consumers, in order, and leave it there."""
        return self.broker.peek(channel, limit=sys.maxsize)

    def consume(self, channel: str, handler: Handler, *, config: ConsumerConfig | None = None) -> Consumed:
        """Hand what lies in ``channel`` to ``handler``, as the hook's ``consume`` does."""
        return Consumer(self.broker, channel, handler, config=config).run_once()

    def scheduled(self) -> list[Message]:
        """Return the messages that still wait, in due order."""
        waiting = select(*MESSAGE_COLUMNS).where(_WAITS).order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
        with self.broker.ledger.read() as connection:
            return [message_of(row) for row in connection.execute(waiting)]

    def record(self, message_id: str) -> MessageRecord:
        """Return what the ledger knows of one message: its state, when it was dispatched, how late."""
        with self.broker.ledger.read() as connection:
            return listing.get(connection, message_id)

    def close(self) -> None:
        """Let go of the database."""
        self.broker.close()

    def _next_due(self) -> datetime | None:
        with self.broker.ledger.read() as connection:
            due_ms = delivery.next_due_ms(connection)
        return None if due_ms is None else from_ms(due_ms)


def _heartbeat() -> heartbeats.Heartbeat:
    return heartbeats.Heartbeat(
        owner=delivery.own_name(), machine=this_machine(), pid=os.getpid(), version="test kit", loops={}
    )
