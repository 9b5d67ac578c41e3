"""Each change of a message leaves a journal entry and changes the counts, in the transaction of the change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, insert, literal, select, tuple_
from sqlalchemy.sql import ColumnElement, Select

from airflow_delay_provider.brokers.ledger.dialect import (
    is_one_of,
    oldest_running_transaction,
    upsert_into,
    writing_transaction,
)
from airflow_delay_provider.brokers.ledger.records import AnyRow, StoredRow
from airflow_delay_provider.brokers.ledger.tables import event, message_count, scheduled_message
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import FINAL_CHANGES, FROM_THE_START, Change, JournalEntry, State

#: (destination, channel, state) -> change of its count.
Deltas = Counter[tuple[str, str, int]]


def append(
    connection: Connection, change: Change, seqs: Sequence[int], *, at_ms: int, reason: str | None = None
) -> None:
    """Record that ``change`` happened to these messages, as they are now."""
    if not seqs:
        return
    source = scheduled_message.c
    entries = select(
        writing_transaction(connection),
        source.seq,
        source.id,
        source.channel,
        literal(change.value),
        literal(at_ms),
        source.deliver_at_ms,
        literal(None if reason is None else storable(reason)),
    ).where(is_one_of(connection, source.seq, seqs))
    columns = ["xid", "message_seq", "message_id", "channel", "change", "at_ms", "deliver_at_ms", "reason"]
    connection.execute(insert(event).from_select(columns, entries))


def end(connection: Connection) -> str:
    """Return a position; every entry that is committed from now on is after it."""
    if connection.dialect.name == "sqlite":
        return f"0:{connection.execute(select(func.coalesce(func.max(event.c.seq), 0))).scalar_one()}"
    return f"{connection.execute(select(oldest_running_transaction(connection))).scalar_one()}:0"


def read(connection: Connection, *, after: str, limit: int) -> list[JournalEntry]:
    """Return the entries after ``after`` whose transactions, and all earlier ones, have ended."""
    query = entries_after(connection, after).where(event.c.xid < oldest_running_transaction(connection))
    return [_entry_of(row) for row in connection.execute(query.limit(limit))]


def entries_after(connection: Connection, position: str) -> Select[*tuple[Any, ...]]:
    """Return the query for the entries after a position, in their order, whether they may be read yet or not."""
    order = [event.c.seq] if connection.dialect.name == "sqlite" else [event.c.xid, event.c.seq]
    return select(event).where(is_after(connection, position)).order_by(*order)


def is_after(connection: Connection, position: str) -> ColumnElement[bool]:
    """Match the entries after a position.

    On SQLite all entries have the same transaction number, and comparing pairs would read the index from its start.
    """
    xid, seq = (0, 0) if position == FROM_THE_START else (int(part) for part in position.split(":"))
    if connection.dialect.name == "sqlite":
        return event.c.seq > seq
    return tuple_(event.c.xid, event.c.seq) > tuple_(literal(xid), literal(seq))


def history(connection: Connection, message_seq: int) -> list[JournalEntry]:
    """Return everything that happened to one message, oldest first."""
    query = select(event).where(event.c.message_seq == message_seq).order_by(event.c.seq)
    return [_entry_of(row) for row in connection.execute(query)]


def final_entries(connection: Connection, message_ids: Sequence[str]) -> Mapping[str, JournalEntry]:
    """Return the first outcome of these messages; what consumers do later does not change it.

    A dead message that is requeued has no outcome yet.
    """
    if not message_ids:
        return {}
    ends: dict[str, JournalEntry] = {}
    dead: set[str] = set()
    query = (
        select(event)
        .join_from(scheduled_message, event, event.c.message_seq == scheduled_message.c.seq)
        .where(
            is_one_of(connection, scheduled_message.c.id, message_ids),
            event.c.change.in_(sorted(FINAL_CHANGES | {Change.REQUEUED})),
        )
        .order_by(event.c.seq)
    )
    for row in connection.execute(query):
        if row.change != Change.REQUEUED:
            ends.setdefault(row.message_id, _entry_of(row))
        elif row.message_id in dead:
            ends.pop(row.message_id, None)
        (dead.add if row.change == Change.DEAD_LETTERED else dead.discard)(row.message_id)
    return ends


def last_ends(connection: Connection, message_ids: Sequence[str]) -> Mapping[str, JournalEntry]:
    """Return the last final entry of each of these messages."""
    if not message_ids:
        return {}
    query = (
        select(event)
        .join_from(scheduled_message, event, event.c.message_seq == scheduled_message.c.seq)
        .where(is_one_of(connection, scheduled_message.c.id, message_ids), event.c.change.in_(sorted(FINAL_CHANGES)))
        .order_by(event.c.seq)
    )
    return {row.message_id: _entry_of(row) for row in connection.execute(query)}


def count_moves(rows: Iterable[AnyRow | StoredRow], *, before: State | None, after: State | None) -> Deltas:
    """Return how the counts change when ``rows`` go from state ``before`` to ``after``."""
    deltas: Deltas = Counter()
    for (destination, channel), n in Counter((row.destination, row.channel) for row in rows).items():
        if before is not None:
            deltas[(destination or "", channel, before.value)] -= n
        if after is not None:
            deltas[(destination or "", channel, after.value)] += n
    return deltas


def add_counts(connection: Connection, deltas: Deltas) -> None:
    """Add ``deltas``, sorted to avoid deadlocks; call it last, so that other writers wait only briefly."""
    changed = [
        {"destination": destination, "channel": channel, "state": state, "n": n}
        for (destination, channel, state), n in sorted(deltas.items())
        if n
    ]
    if not changed:
        return
    statement = upsert_into(connection.dialect.name, message_count)
    statement = statement.on_conflict_do_update(
        index_elements=["destination", "channel", "state"],
        set_={"n": message_count.c.n + statement.excluded.n},
    )
    connection.execute(statement, changed)


def storable(text: str) -> str:
    """Return text that every database can store: a reason with invalid characters must not prevent a dead letter."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def _entry_of(row: AnyRow) -> JournalEntry:
    return JournalEntry(
        message_id=row.message_id,
        change=Change(row.change),
        at=from_ms(row.at_ms),
        channel=row.channel,
        deliver_at=from_ms(row.deliver_at_ms),
        position=f"{row.xid}:{row.seq}",
        reason=row.reason,
    )
