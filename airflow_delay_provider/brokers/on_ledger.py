"""What brokers share whose messages wait in the ledger, wherever their channels are: storing, control, journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from sqlalchemy import Connection

from airflow_delay_provider.brokers.base import Broker, Outcome, Receipt
from airflow_delay_provider.domain.clock import Clock, ceil_ms, floor_ms
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters, Replayed
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message, require_aware
from airflow_delay_provider.domain.schedule import Limits, OnConflict
from airflow_delay_provider.exceptions import LedgerError
from airflow_delay_provider.ledger import counts, delivery, journal, replay, scheduling
from airflow_delay_provider.ledger.database import Ledger
from airflow_delay_provider.ledger.records import AnyRow, StoredRow

TakenT = TypeVar("TakenT")
#: What is done with due messages in the transaction that stored them, by their numbers.
TakeDue = Callable[[Connection, Sequence[int]], TakenT]


#: Messages of one transaction.
REPLAY_BATCH = 1000


class LedgerBroker(Broker):
    """The row is the promise: a message waits in the ledger until it is dispatched."""

    #: The connection of the broker that messages go to; None is the channels of the ledger itself.
    destination: str | None = None

    def __init__(self, ledger: Ledger, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        super().__init__(limits=limits, clock=clock)
        self.ledger = ledger

    def cancel(self, message_ids: Sequence[str]) -> None:
        self._change(message_ids, Change.CANCELLED)

    def reschedule(self, message_ids: Sequence[str], deliver_at: datetime) -> None:
        due = require_aware("deliver_at", deliver_at)
        self.limits.check_delay(due, now=self.clock.now())
        self._change(message_ids, Change.RESCHEDULED, deliver_at_ms=ceil_ms(due))

    def expedite(self, message_ids: Sequence[str]) -> None:
        self._change(message_ids, Change.EXPEDITED, deliver_at_ms=self._now_ms())

    def count_dead(self, selection: DeadLetters) -> DeadCount:
        with self.ledger.read() as connection:
            return DeadCount(count=replay.count(connection, selection, destination=self.destination))

    def replay(self, selection: DeadLetters) -> Replayed:
        """Let dead rows wait again, a transaction a batch: a crash leaves whole batches, and the rest is still dead."""
        began_ms, count, found = self._now_ms(), 0, set[str]()

        def work(connection: Connection) -> list[AnyRow]:
            return replay.replay(
                connection,
                selection,
                destination=self.destination,
                now_ms=self._now_ms(),
                died_until_ms=began_ms,
                limit=REPLAY_BATCH,
            )

        while rows := self.ledger.transact(work):
            count += len(rows)
            if selection.message_ids:
                found |= {row.id for row in rows}
            if len(rows) < REPLAY_BATCH:
                break
        return Replayed(count=count, missing=tuple(each for each in selection.message_ids if each not in found))

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

    def _settings(self) -> object:
        return self.ledger.url

    def check(self) -> str:
        with self.ledger.read() as connection:
            known = sum(counts.by_state(connection).values())
        return f"ledger at {self.ledger.name} is ready; it knows {known} messages"

    def close(self) -> None:
        self.ledger.close()

    def _store(
        self, messages: Sequence[Message], on_conflict: OnConflict, take_due: TakeDue[TakenT], *, even_if_later: bool
    ) -> tuple[list[Receipt], TakenT]:
        """Store all messages or none, let ``take_due`` have those that are due, and return what it made of them."""

        def store(connection: Connection) -> tuple[list[Receipt], TakenT]:
            now_ms = self._now_ms()
            fresh = scheduling.insert(
                connection, messages, destination=self.destination, on_conflict=on_conflict, now_ms=now_ms
            )
            due = {row.seq for row in fresh.values() if even_if_later or row.deliver_at_ms <= now_ms}
            if not even_if_later and any(message.key is not None for message in messages):
                due -= delivery.behind_earlier(connection, sorted(due), destination=self.destination, now_ms=now_ms)
            taken = take_due(connection, sorted(due))
            replaced = Outcome.REPLACED if on_conflict is OnConflict.REPLACE else Outcome.SCHEDULED
            return [_receipt(message, fresh.get(message.id), due, replaced) for message in messages], taken

        try:
            return self.ledger.transact(store)
        except LedgerError as error:
            raise LedgerError(str(error), unconfirmed=[message.id for message in messages]) from error

    def _change(self, message_ids: Sequence[str], change: Change, *, deliver_at_ms: int | None = None) -> None:
        def work(connection: Connection) -> None:
            scheduling.change_waiting(
                connection, message_ids, change, now_ms=self._now_ms(), deliver_at_ms=deliver_at_ms
            )

        self.ledger.transact(work)

    def _now_ms(self) -> int:
        return floor_ms(self.clock.now())

    def _due_ms(self, delay: timedelta) -> int:
        """Return the due time after ``delay``: never early, and without a delay not ahead of now."""
        return ceil_ms(self.clock.now() + delay) if delay > timedelta(0) else self._now_ms()


def _receipt(message: Message, row: StoredRow | None, due: set[int], replaced: Outcome) -> Receipt:
    if row is None:
        outcome = Outcome.KEPT
    elif row.seq in due:
        outcome = Outcome.DISPATCHED
    elif row.generation > 0:
        outcome = replaced
    else:
        outcome = Outcome.SCHEDULED
    return Receipt(message_id=message.id, outcome=outcome)
