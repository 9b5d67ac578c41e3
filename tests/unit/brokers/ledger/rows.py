"""Short ways to put messages into a ledger and to take them through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection

from airflow_delay_provider.brokers.ledger import delivery, fold, journal, listing, projection, pruning, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.listing import Page
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry, State
from airflow_delay_provider.domain.message import Message
from tools.servers.component import wait_for

ResultT = TypeVar("ResultT")
#: The time at which these tests happen.
NOW_MS = 1_900_000_000_000


def message(due_ms: int = NOW_MS + 1000, **options: Any) -> Message:
    return Message(**{"channel": "orders", "payload": b"{}", "deliver_at": from_ms(due_ms)} | options)


def messages(*due: int, **options: Any) -> list[Message]:
    """Messages that are due these milliseconds after now."""
    return [message(NOW_MS + after, **options) for after in due]


def insert(
    ledger: Ledger,
    batch: Sequence[Message],
    *,
    destination: str | None = None,
    on_conflict: OnConflict = OnConflict.KEEP,
) -> list[str]:
    """Store messages and return the ids that are new or replaced."""
    return ledger.transact(
        lambda c: list(scheduling.insert(c, batch, destination=destination, on_conflict=on_conflict, now_ms=NOW_MS))
    )


def change(ledger: Ledger, change: Change, *batch: Message, deliver_at_ms: int | None = None) -> None:
    ids = [item.id for item in batch]
    ledger.transact(lambda c: scheduling.change_waiting(c, ids, change, now_ms=NOW_MS, deliver_at_ms=deliver_at_ms))


def deliver(ledger: Ledger, *, now_ms: int = NOW_MS, limit: int = 1000) -> int:
    return ledger.transact(lambda c: len(delivery.deliver_due(c, now_ms=now_ms, limit=limit)))


def prune(ledger: Ledger, *, before_ms: int, limit: int = 100) -> int:
    """Delete all messages that ended before then, page by page, and return how many."""
    deleted, place = 0, pruning.Place()
    while True:
        found = read(ledger, lambda c, place=place: pruning.find_old(c, place, before_ms=before_ms, limit=limit))
        deleted += ledger.transact(pruning.prune, found.state, found.seqs, before_ms=before_ms) if found.seqs else 0
        if found.next is None:
            return deleted
        place = found.next


def fold_all(ledger: Ledger, *, limit: int = 1000) -> None:
    """Fold the whole journal; on PostgreSQL, the last entries wait for transactions of others on the server."""

    def is_folded() -> bool:
        while ledger.transact(fold.fold, limit):
            pass
        return read(ledger, has_no_more)

    def has_no_more(connection: Connection) -> bool:
        after = projection.position_of(connection, EMBEDDED)
        return connection.execute(journal.entries_after(connection, after).limit(1)).first() is None

    wait_for(is_folded, what="the end of the journal", seconds=30)


def read(ledger: Ledger, query: Callable[[Connection], ResultT]) -> ResultT:
    with ledger.read() as connection:
        return query(connection)


def read_journal(ledger: Ledger, n: int, *, after: str = FROM_THE_START) -> list[JournalEntry]:
    """Return ``n`` entries or more, which a reader sees when all older transactions on the server have ended."""
    return wait_for(
        lambda: len(found := read(ledger, lambda c: journal.read(c, after=after, limit=1000))) >= n and found,
        what=f"{n} entries in the journal",
        seconds=60,
        interval=0.02,
    )


def get(ledger: Ledger, item: Message) -> MessageRecord:
    return read(ledger, lambda c: listing.get(c, item.id))


def state(ledger: Ledger, item: Message) -> State:
    return get(ledger, item).state


def page(ledger: Ledger, **options: Any) -> Page:
    return read(ledger, lambda c: listing.page(c, **options))


def ids(records: Sequence[MessageRecord]) -> list[str]:
    return [record.message.id for record in records]


def count(ledger: Ledger, *, channel: str | None = None) -> dict[State, int]:
    """The states that have messages."""
    found = read(ledger, lambda c: listing.count_by_state(c, channel=channel))
    assert set(found) == set(State)
    return {state: n for state, n in found.items() if n}
