"""The embedded broker: the ledger holds the wait, and the channels are tables in the same database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection

from airflow_delay_provider.brokers.base import DEFAULT_VISIBILITY, Broker, Outcome, Receipt
from airflow_delay_provider.domain.clock import Clock, ceil_ms, floor_ms
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Delivery, Message, require_aware
from airflow_delay_provider.domain.schedule import Limits, OnConflict
from airflow_delay_provider.exceptions import LedgerError
from airflow_delay_provider.ledger import channels, counts, delivery, journal, scheduling
from airflow_delay_provider.ledger.database import Ledger
from airflow_delay_provider.ledger.records import StoredRow


class EmbeddedBroker(Broker):
    """Exactly once from ``schedule`` to the channel: moving and marking a message is one transaction."""

    def __init__(self, ledger: Ledger, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        super().__init__(limits=limits, clock=clock)
        self.ledger = ledger

    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]:
        return self._store(messages, on_conflict, even_if_later=False)

    def _send(self, messages: Sequence[Message]) -> list[Receipt]:
        return self._store(messages, OnConflict.KEEP, even_if_later=True)

    def _store(self, messages: Sequence[Message], on_conflict: OnConflict, *, even_if_later: bool) -> list[Receipt]:
        def store(connection: Connection) -> list[Receipt]:
            now_ms = self._now_ms()
            fresh = scheduling.insert(connection, messages, on_conflict=on_conflict, now_ms=now_ms)
            due = {row.seq for row in fresh.values() if even_if_later or row.deliver_at_ms <= now_ms}
            if not even_if_later and any(message.key is not None for message in messages):
                due -= delivery.behind_earlier(connection, sorted(due), now_ms=now_ms)
            delivery.deliver_now(connection, sorted(due), now_ms=now_ms)
            return [_receipt(message, fresh.get(message.id), due) for message in messages]

        try:
            return self.ledger.transact(store)
        except LedgerError as error:
            raise LedgerError(str(error), unconfirmed=[message.id for message in messages]) from error

    def cancel(self, message_ids: Sequence[str]) -> None:
        self._change(message_ids, Change.CANCELLED)

    def reschedule(self, message_ids: Sequence[str], deliver_at: datetime) -> None:
        due = require_aware("deliver_at", deliver_at)
        self.limits.check_delay(due, now=self.clock.now())
        self._change(message_ids, Change.RESCHEDULED, deliver_at_ms=ceil_ms(due))

    def expedite(self, message_ids: Sequence[str]) -> None:
        self._change(message_ids, Change.EXPEDITED, deliver_at_ms=self._now_ms())

    def _change(self, message_ids: Sequence[str], change: Change, *, deliver_at_ms: int | None = None) -> None:
        def work(connection: Connection) -> None:
            scheduling.change_waiting(
                connection, message_ids, change, now_ms=self._now_ms(), deliver_at_ms=deliver_at_ms
            )

        self.ledger.transact(work)

    def receive(self, channel: str, *, limit: int = 1, visibility: timedelta = DEFAULT_VISIBILITY) -> list[Delivery]:
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
            now = self.clock.now()
            channels.requeue(
                connection,
                delivery,
                deliver_at_ms=ceil_ms(now + delay) if delay > timedelta(0) else floor_ms(now),
                now_ms=floor_ms(now),
                reason=reason,
            )

        self.ledger.transact(work)

    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        self.ledger.transact(
            lambda connection: channels.dead_letter(
                connection, delivery, channel=channel, now_ms=self._now_ms(), reason=reason
            )
        )

    def journal_end(self) -> str:
        with self.ledger.read() as connection:
            return journal.end(connection)

    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        with self.ledger.read() as connection:
            return journal.read(connection, after=after, limit=limit)

    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:  # noqa: ARG002
        # The journal is indexed by message, so nothing needs to be read back from ``since``.
        with self.ledger.read() as connection:
            return journal.final_entries(connection, message_ids)

    def check(self) -> str:
        with self.ledger.read() as connection:
            known = sum(counts.by_state(connection).values())
        return f"ledger at {self.ledger.name} is ready; it knows {known} messages"

    def close(self) -> None:
        self.ledger.close()

    def _now_ms(self) -> int:
        return floor_ms(self.clock.now())


def _receipt(message: Message, row: StoredRow | None, due: set[int]) -> Receipt:
    if row is None:
        outcome = Outcome.KEPT
    elif row.seq in due:
        outcome = Outcome.DISPATCHED
    elif row.generation > 0:
        outcome = Outcome.REPLACED
    else:
        outcome = Outcome.SCHEDULED
    return Receipt(message_id=message.id, outcome=outcome)


def _refuse_ended(deliveries: Sequence[Delivery], ended: set[str]) -> None:
    for item in deliveries:
        if item.handle in ended:
            raise channels.visibility_ended(item)
