"""The journal of another broker, followed in rows here, so that what it holds can be listed, counted and shown."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Update, bindparam, insert, select, update

from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.domain.journal import FROM_THE_START, JournalEntry
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.exceptions import InvalidMessageError
from airflow_delay_provider.ledger import counts, journal
from airflow_delay_provider.ledger.dialect import Upsert, insert_rows, is_one_of, upsert_into, writing_transaction
from airflow_delay_provider.ledger.followed import Followed
from airflow_delay_provider.ledger.records import row_of
from airflow_delay_provider.ledger.tables import event, journal_position, scheduled_message

log = logging.getLogger(__name__)

_MESSAGE = scheduled_message.c
_POSITION = journal_position.c
_CONTENT = ("payload", "content_type", "key", "headers", "priority", "dag_id", "run_id", "task_id", "map_index")
_ORIGIN = ("dag_id", "run_id", "task_id")
_ORIGIN_LENGTH = 250
_MAX_INTEGER = 2**31 - 1


def position_of(connection: Connection, destination: str) -> str:
    """Return up to where the journal of a connection has been followed."""
    found = connection.execute(select(_POSITION.position).where(_POSITION.destination == destination)).scalar()
    return FROM_THE_START if found is None else found


def project(
    connection: Connection, destination: str, entries: Sequence[JournalEntry], *, after: str, position: str
) -> bool:
    """Apply the entries that were read behind ``after`` and return whether that was still to be done.

    Each page is applied once, whoever reads it how often: rows, history, counts and the step from ``after`` to
    ``position`` are one transaction, which changes nothing when somebody else has made that step. What the journal
    itself tells twice changes nothing either. A message whose wait the ledger keeps is left alone.
    """
    if not _step(connection, destination, after=after, position=position):
        return False
    followed, left_alone = _load(connection, destination, sorted({entry.message_id for entry in entries}))
    news = [entry for entry in entries if entry.message_id not in left_alone and _apply(followed, entry)]
    changed = {entry.message_id: followed[entry.message_id] for entry in news}
    _update(connection, [each for each in changed.values() if each.before is not None])
    _insert(connection, destination, {id: each for id, each in changed.items() if each.before is None})
    stored = {id: each for id, each in changed.items() if each.seq is not None}
    _record(connection, stored, [entry for entry in news if entry.message_id in stored])
    _count(connection, destination, stored.values())
    return True


def _step(connection: Connection, destination: str, *, after: str, position: str) -> bool:
    step: Upsert | Update
    if after == FROM_THE_START:
        step = upsert_into(connection.dialect.name, journal_position).on_conflict_do_nothing(
            index_elements=["destination"]
        )
    else:
        step = update(journal_position).where(_POSITION.destination == destination, _POSITION.position == after)
    step = step.values(destination=destination, position=position)
    return connection.execute(step.returning(_POSITION.destination)).first() is not None


def _load(connection: Connection, destination: str, message_ids: Sequence[str]) -> tuple[dict[str, Followed], set[str]]:
    """Return what is known of messages that this broker holds, and the ids of others."""
    if not message_ids:
        return {}, set()
    content = {_MESSAGE[name] for name in _CONTENT}
    columns = [column for column in scheduled_message.columns if column not in content]
    query = select(*columns).where(is_one_of(connection, _MESSAGE.id, message_ids)).with_for_update()
    rows = connection.execute(query).all()
    held = {row.id: Followed.from_row(row) for row in rows if row.held_by_broker and row.destination == destination}
    by_seq = {each.seq: each for each in held.values() if each.seq is not None}
    if by_seq:
        entries = select(event.c.message_seq, event.c.change, event.c.at_ms, event.c.deliver_at_ms)
        for seq, *key in connection.execute(entries.where(is_one_of(connection, event.c.message_seq, list(by_seq)))):
            by_seq[seq].recorded.add((key[0], key[1], key[2]))
    return held, {row.id for row in rows} - held.keys()


def _apply(followed: dict[str, Followed], entry: JournalEntry) -> bool:
    known = followed.get(entry.message_id)
    if known is not None:
        return known.apply(entry)
    try:
        followed[entry.message_id] = Followed.from_entry(entry)
    except InvalidMessageError as error:
        log.warning("The journal tells of a message that cannot be listed: %s", error)
        return False
    return True


def _update(connection: Connection, known: Sequence[Followed]) -> None:
    statement = update(scheduled_message).where(_MESSAGE.seq == bindparam("row_seq"))
    if known:
        connection.execute(statement, [{"row_seq": each.seq} | _values(each) for each in known])
    replaced = [{"row_seq": each.seq} | _content(each.message) for each in known if each.message is not None]
    if replaced:
        connection.execute(statement, replaced)


def _insert(connection: Connection, destination: str, new: dict[str, Followed]) -> None:
    """Store rows and note their numbers; an id that somebody else stores at this moment gets none."""
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


def _values(each: Followed) -> dict[str, Any]:
    return each.values() | {"handled_count": min(each.handled_count, _MAX_INTEGER)}


def _content(message: Message) -> dict[str, Any]:
    """Return the content of a message, cut to what the columns take: it was never checked for this ledger."""
    row = row_of(message, destination=None, now_ms=0)
    content = {name: row[name] for name in _CONTENT}
    for name in _ORIGIN:
        if content[name] is not None:
            content[name] = journal.storable(content[name])[:_ORIGIN_LENGTH]
    return content | {"priority": max(-_MAX_INTEGER, min(message.priority, _MAX_INTEGER))}


def _record(connection: Connection, stored: dict[str, Followed], news: Sequence[JournalEntry]) -> None:
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


def _count(connection: Connection, destination: str, stored: Collection[Followed]) -> None:
    deltas: counts.Deltas = Counter()
    for each in stored:
        if each.before is not None:
            deltas[(destination, each.channel, each.before.value)] -= 1
        deltas[(destination, each.channel, each.state.value)] += 1
    counts.apply(connection, deltas)
