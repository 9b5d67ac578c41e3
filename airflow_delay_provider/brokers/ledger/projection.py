"""Project the journal of another broker into rows of the ledger, so that its messages can be listed and counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

from sqlalchemy import Connection, Update, bindparam, insert, select, update

from airflow_delay_provider.brokers.ledger import journal
from airflow_delay_provider.brokers.ledger.dialect import (
    Upsert,
    insert_rows,
    is_one_of,
    upsert_into,
    writing_transaction,
)
from airflow_delay_provider.brokers.ledger.records import AnyRow, row_of
from airflow_delay_provider.brokers.ledger.tables import event, journal_position, scheduled_message
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, TRANSITIONS, Change, JournalEntry, State, outcome_of
from airflow_delay_provider.domain.message import Message

log = logging.getLogger(__name__)

_MESSAGE = scheduled_message.c
_POSITION = journal_position.c
_CONTENT = ("payload", "content_type", "key", "headers", "priority", "dag_id", "run_id", "task_id", "map_index")
_ORIGIN = ("dag_id", "run_id", "task_id")
_ORIGIN_LENGTH = 250
_MAX_INTEGER = 2**31 - 1
#: Identifies an entry of a message: the change, its time, and the due time after it.
EntryKey = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedPage:
    """What one page of a journal changed."""

    #: Entries by which messages became dispatched; a duplicate is not among them.
    dispatched: Sequence[JournalEntry]


def position_of(connection: Connection, destination: str) -> str:
    """Return the position up to which the journal of a connection has been projected."""
    found = connection.execute(select(_POSITION.position).where(_POSITION.destination == destination)).scalar()
    return FROM_THE_START if found is None else found


def project(
    connection: Connection, destination: str, entries: Sequence[JournalEntry], *, after: str, position: str
) -> AppliedPage | None:
    """Apply the entries that were read after ``after``; return None if another dispatcher has done so.

    Each page is applied once: rows, history, counts and the step from ``after`` to ``position`` are one transaction,
    which changes nothing if that step was made before. Duplicate journal entries are ignored, and so are entries of
    ledger-held messages.
    """
    if not step(connection, destination, after=after, position=position):
        return None
    known_messages, ignored = _load(connection, destination, sorted({entry.message_id for entry in entries}))
    news = [entry for entry in entries if entry.message_id not in ignored and _apply(known_messages, entry)]
    changed = {entry.message_id: known_messages[entry.message_id] for entry in news}
    _update(connection, [each for each in changed.values() if each.before is not None])
    _insert(connection, destination, {id: each for id, each in changed.items() if each.before is None})
    stored = {id: each for id, each in changed.items() if each.seq is not None}
    recorded = [entry for entry in news if entry.message_id in stored]
    _record(connection, stored, recorded)
    _count(connection, destination, stored.values())
    return AppliedPage(dispatched=[entry for entry in recorded if entry.change is Change.DISPATCHED])


def step(connection: Connection, destination: str, *, after: str, position: str) -> bool:
    """Move the position of a connection from ``after`` to ``position``; return False if it is not at ``after``.

    Another process that makes the same step waits for the end of this transaction.
    """
    move: Upsert | Update
    if after == FROM_THE_START:
        move = upsert_into(connection.dialect.name, journal_position).on_conflict_do_nothing(
            index_elements=["destination"]
        )
    else:
        move = update(journal_position).where(_POSITION.destination == destination, _POSITION.position == after)
    move = move.values(destination=destination, position=position)
    return connection.execute(move.returning(_POSITION.destination)).first() is not None


def _load(
    connection: Connection, destination: str, message_ids: Sequence[str]
) -> tuple[dict[str, Projected], set[str]]:
    """Return the known messages that this broker holds, and the ids of others."""
    if not message_ids:
        return {}, set()
    content = {_MESSAGE[name] for name in _CONTENT}
    columns = [column for column in scheduled_message.columns if column not in content]
    query = select(*columns).where(is_one_of(connection, _MESSAGE.id, message_ids)).with_for_update()
    rows = connection.execute(query).all()
    held = {row.id: Projected.from_row(row) for row in rows if row.held_by_broker and row.destination == destination}
    by_seq = {each.seq: each for each in held.values() if each.seq is not None}
    if by_seq:
        entries = select(event.c.message_seq, event.c.change, event.c.at_ms, event.c.deliver_at_ms)
        for seq, *key in connection.execute(entries.where(is_one_of(connection, event.c.message_seq, list(by_seq)))):
            by_seq[seq].recorded.add((key[0], key[1], key[2]))
    return held, {row.id for row in rows} - held.keys()


def _apply(known_messages: dict[str, Projected], entry: JournalEntry) -> bool:
    known = known_messages.get(entry.message_id)
    if known is not None:
        return known.apply(entry)
    try:
        known_messages[entry.message_id] = Projected.from_entry(entry)
    except InvalidMessageError as error:
        log.warning("The journal has an entry of a message that cannot be listed: %s", error)
        return False
    return True


def _update(connection: Connection, known: Sequence[Projected]) -> None:
    statement = update(scheduled_message).where(_MESSAGE.seq == bindparam("row_seq"))
    if known:
        connection.execute(statement, [{"row_seq": each.seq} | _values(each) for each in known])
    replaced = [{"row_seq": each.seq} | _content(each.message) for each in known if each.message is not None]
    if replaced:
        connection.execute(statement, replaced)


def _insert(connection: Connection, destination: str, new: dict[str, Projected]) -> None:
    """Store rows and keep their numbers; an id that another process stores at this moment gets none."""
    rows = [
        row_of(each.message, destination=destination, now_ms=each.first_at_ms)
        | _content(each.message)
        | _values(each)
        | {"held_by_broker": 1}
        for each in new.values()
        if each.message is not None
    ]
    if rows:
        for row in insert_rows(connection, _insert_statement(connection.dialect.name), rows):
            new[row.id].seq = row.seq


@lru_cache
def _insert_statement(dialect: str) -> Upsert:
    return upsert_into(dialect, scheduled_message).on_conflict_do_nothing(index_elements=["id"])


def _values(each: Projected) -> dict[str, Any]:
    return each.values() | {"handled_count": min(each.handled_count, _MAX_INTEGER)}


def _content(message: Message) -> dict[str, Any]:
    """Return the content of a message, cut to the size of the columns: it was never checked for this ledger."""
    row = row_of(message, destination=None, now_ms=0)
    content = {name: row[name] for name in _CONTENT}
    for name in _ORIGIN:
        if content[name] is not None:
            content[name] = journal.storable(content[name])[:_ORIGIN_LENGTH]
    return content | {"priority": max(-_MAX_INTEGER, min(message.priority, _MAX_INTEGER))}


def _record(connection: Connection, stored: dict[str, Projected], news: Sequence[JournalEntry]) -> None:
    if not news:
        return
    xid = connection.execute(select(writing_transaction(connection))).scalar_one()
    history = [
        {
            "xid": xid,
            "message_seq": stored[entry.message_id].seq,
            "message_id": entry.message_id,
            "channel": stored[entry.message_id].channel,
            "change": entry.change.value,
            "at_ms": floor_ms(entry.at),
            "deliver_at_ms": ceil_ms(entry.deliver_at),
            "reason": None if entry.reason is None else journal.storable(entry.reason),
        }
        for entry in news
    ]
    connection.execute(insert(event), history)


def _count(connection: Connection, destination: str, stored: Collection[Projected]) -> None:
    deltas: journal.Deltas = Counter()
    for each in stored:
        if each.before is not None:
            deltas[(destination, each.channel, each.before.value)] -= 1
        deltas[(destination, each.channel, each.state.value)] += 1
    journal.add_counts(connection, deltas)


def key_of(entry: JournalEntry) -> EntryKey:
    """Return the key of an entry, which is the same when it is read again."""
    return entry.change.value, floor_ms(entry.at), ceil_ms(entry.deliver_at)


def _dispatched_at_ms(entry: JournalEntry) -> int | None:
    return None if entry.lateness is None else floor_ms(entry.at)


@dataclass(kw_only=True, slots=True)
class Projected:
    """One message while entries are applied to it."""

    channel: str
    state: State
    deliver_at_ms: int
    handled_count: int
    dispatched_at_ms: int | None
    updated_at_ms: int
    #: The time of its first entry.
    first_at_ms: int
    generation: int = 0
    #: The number of its row; None if it has no row yet.
    seq: int | None = None
    #: The state that its row has.
    before: State | None = None
    #: Content that its row does not have.
    message: Message | None = None
    recorded: set[EntryKey] = field(default_factory=set)

    @classmethod
    def from_row(cls, row: AnyRow) -> Self:
        """Continue with a known message."""
        state = State(row.state)
        return cls(
            channel=row.channel,
            state=state,
            deliver_at_ms=row.deliver_at_ms,
            handled_count=row.handled_count,
            dispatched_at_ms=row.dispatched_at_ms,
            updated_at_ms=row.updated_at_ms,
            first_at_ms=row.scheduled_at_ms,
            generation=row.generation,
            seq=row.seq,
            before=state,
        )

    @classmethod
    def from_entry(cls, entry: JournalEntry) -> Self:
        """Start with any entry: the journal may begin after the message was scheduled."""
        message = entry.message or Message(
            id=entry.message_id, channel=entry.channel, payload=b"", deliver_at=entry.deliver_at
        )
        return cls(
            channel=message.channel,
            state=outcome_of(entry.change),
            deliver_at_ms=ceil_ms(entry.deliver_at),
            handled_count=message.handled_count,
            dispatched_at_ms=_dispatched_at_ms(entry) if entry.change is Change.DISPATCHED else None,
            updated_at_ms=floor_ms(entry.at),
            first_at_ms=floor_ms(entry.at),
            message=message,
            recorded={key_of(entry)},
        )

    def apply(self, entry: JournalEntry) -> bool:
        """Apply an entry; return False for one that changes nothing, such as a duplicate."""
        if not self._is_new(entry):
            return False
        match entry.change:
            case Change.DISPATCHED:
                self.dispatched_at_ms = _dispatched_at_ms(entry)
            case Change.REQUEUED:
                self.dispatched_at_ms = None
                self.handled_count = 0 if self.state is State.DEAD else self.handled_count + 1
            case Change.RESCHEDULED:
                # Replacing a message is recorded as rescheduled, too.
                self.message = entry.message or self.message
        if entry.change is not Change.DISPATCHED:
            self.generation += 1
        if entry.message is not None:
            self.handled_count = entry.message.handled_count
        self.state = outcome_of(entry.change)
        self.deliver_at_ms, self.updated_at_ms = ceil_ms(entry.deliver_at), floor_ms(entry.at)
        self.recorded.add(key_of(entry))
        return True

    def values(self) -> dict[str, Any]:
        """Return the columns that entries change."""
        return {
            "state": self.state.value,
            "deliver_at_ms": self.deliver_at_ms,
            "handled_count": self.handled_count,
            "generation": self.generation,
            "updated_at_ms": self.updated_at_ms,
            "dispatched_at_ms": self.dispatched_at_ms,
        }

    def _is_new(self, entry: JournalEntry) -> bool:
        """Duplicates are normal: a broker without a confirmation sends again, and a journal may be read again."""
        if (self.state, entry.change) not in TRANSITIONS:
            return False
        count = None if entry.message is None else entry.message.handled_count
        if entry.change is Change.DISPATCHED:
            # A duplicate of an earlier delivery has a lower count, or another due time and is before the current one.
            return (count is None or count >= self.handled_count) and (
                ceil_ms(entry.deliver_at) == self.deliver_at_ms or floor_ms(entry.at) >= self.deliver_at_ms
            )
        if entry.change is Change.REQUEUED and self.state is State.DISPATCHED and count is not None:
            return count > self.handled_count and key_of(entry) not in self.recorded
        return key_of(entry) not in self.recorded
