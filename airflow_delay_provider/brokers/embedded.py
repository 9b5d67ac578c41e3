"""The embedded broker: the ledger holds the wait, and the channels are tables in the same database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from sqlalchemy import Connection

from airflow_delay_provider.brokers.base import DEFAULT_VISIBILITY, Receipt
from airflow_delay_provider.brokers.embedded_shared_consumer import EmbeddedSharedConsumer
from airflow_delay_provider.brokers.on_ledger import LedgerBroker
from airflow_delay_provider.brokers.shared_consumer import SharedConsumer
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.domain.message import Delivery, Message
from airflow_delay_provider.domain.schedule import OnConflict
from airflow_delay_provider.ledger import channels, delivery


class EmbeddedBroker(LedgerBroker):
    """Exactly once from ``schedule`` to the channel: moving and marking a message is one transaction."""

    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]:
        return self._store_and_deliver(messages, on_conflict, even_if_later=False)

    def _send(self, messages: Sequence[Message]) -> list[Receipt]:
        return self._store_and_deliver(messages, OnConflict.KEEP, even_if_later=True)

    def _store_and_deliver(
        self, messages: Sequence[Message], on_conflict: OnConflict, *, even_if_later: bool
    ) -> list[Receipt]:
        def deliver(connection: Connection, seqs: Sequence[int]) -> None:
            delivery.deliver_now(connection, seqs, now_ms=self._now_ms())

        receipts, _ = self._store(messages, on_conflict, deliver, even_if_later=even_if_later)
        return receipts

    def receive(
        self,
        channel: str,
        *,
        limit: int = 1,
        visibility: timedelta = DEFAULT_VISIBILITY,
        wait: timedelta = timedelta(0),  # noqa: ARG002 - nobody holds what could be handed over
    ) -> list[Delivery]:
        def work(connection: Connection) -> list[Delivery]:
            now = self.clock.now()
            return channels.receive(
                connection,
                channel,
                limit=limit,
                now_ms=floor_ms(now),
                visible_again_ms=ceil_ms(now + visibility),
            )

        # An empty channel is seen without taking the write lock.
        with self.ledger.read() as connection:
            is_empty = channels.is_empty(connection, channel, now_ms=self._now_ms())
        return [] if is_empty else self.ledger.transact(work)

    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        with self.ledger.read() as connection:
            return channels.peek(connection, channel, limit=limit, now_ms=self._now_ms())

    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        del on_change  # A database tells nobody that it has changed.
        return EmbeddedSharedConsumer(self.ledger, self.clock)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        ended = self.ledger.transact(lambda connection: channels.ack(connection, deliveries))
        _refuse_ended(deliveries, ended)

    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        visible_at_ms = ceil_ms(self.clock.now() + delay)
        ended = self.ledger.transact(
            lambda connection: channels.release(connection, deliveries, visible_at_ms=visible_at_ms)
        )
        _refuse_ended(deliveries, ended)

    def requeue(self, delivery: Delivery, delay: timedelta, *, reason: str | None = None) -> None:
        def work(connection: Connection) -> None:
            due_ms = self._due_ms(delay)
            channels.requeue(connection, delivery, deliver_at_ms=due_ms, now_ms=self._now_ms(), reason=reason)

        self.ledger.transact(work)

    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        self.ledger.transact(
            lambda connection: channels.dead_letter(
                connection, delivery, channel=channel, now_ms=self._now_ms(), reason=reason
            )
        )


def _refuse_ended(deliveries: Sequence[Delivery], ended: set[str]) -> None:
    for item in deliveries:
        if item.handle in ended:
            raise channels.visibility_ended(item)
