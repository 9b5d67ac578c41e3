"""Due messages leave the ledger: into a channel of this database, or to another broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, exists, func, insert, literal, select, tuple_, update
from sqlalchemy.sql import ColumnElement

from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.ledger import counts, journal
from airflow_delay_provider.ledger.dialect import is_one_of, lock_until_commit
from airflow_delay_provider.ledger.records import MESSAGE_COLUMNS, message_of
from airflow_delay_provider.ledger.tables import channel_message, scheduled_message

_MESSAGE = scheduled_message.c
_WAITS = _MESSAGE.state == State.SCHEDULED.value
_HERE = _MESSAGE.destination.is_(None)
#: Takers of due messages go one after the other, so that a later one never overtakes an earlier one of the same key.
_TAKE_DUE_LOCK = 5_390_117_423
_MOVED = (_MESSAGE.seq, _MESSAGE.channel, _MESSAGE.destination, _MESSAGE.deliver_at_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A message that one dispatcher may send to another broker until the claim ends."""

    seq: int
    message: Message


def next_due_ms(connection: Connection) -> int | None:
    """Return when the next message is due that nobody is sending; one look at an index."""
    here = select(func.min(_MESSAGE.deliver_at_ms).label("due")).where(_WAITS, _HERE)
    due: int | None = connection.execute(here).scalar()
    for destination in counts.waiting_destinations(connection):
        away = connection.execute(
            select(func.min(_MESSAGE.deliver_at_ms)).where(_is_unclaimed_for(destination))
        ).scalar()
        if away is not None and (due is None or away < due):
            due = away
    return due


def deliver_due(connection: Connection, *, now_ms: int, limit: int) -> list[Row[Any]]:
    """Move due messages into their channels here, oldest first, and return their rows.

    Moving, marking, journal and counts are one transaction: a message is in its channel exactly when it is marked.
    """
    lock_until_commit(connection, _TAKE_DUE_LOCK)
    due = (
        select(_MESSAGE.seq)
        .where(_WAITS, _HERE, _MESSAGE.deliver_at_ms <= now_ms)
        .order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return _deliver(connection, _MESSAGE.seq.in_(due), now_ms=now_ms)


def deliver_now(connection: Connection, seqs: Sequence[int], *, now_ms: int) -> list[Row[Any]]:
    """Move messages into their channels here, due or not."""
    return _deliver(connection, is_one_of(connection, _MESSAGE.seq, seqs), now_ms=now_ms) if seqs else []


def claim_due(
    connection: Connection, *, destination: str, owner: str, now_ms: int, until_ms: int, limit: int
) -> list[Claim]:
    """Take due messages for another broker, oldest first; nobody else sends them until ``until_ms``.

    A message waits while an earlier one of its channel and key is being sent by somebody else.
    """
    lock_until_commit(connection, _TAKE_DUE_LOCK)
    earlier = scheduled_message.alias("earlier")
    overtakes = exists().where(
        earlier.c.claimed_until_ms.is_not(None),
        earlier.c.channel == _MESSAGE.channel,
        earlier.c.key == _MESSAGE.key,
        tuple_(earlier.c.deliver_at_ms, earlier.c.seq) < tuple_(_MESSAGE.deliver_at_ms, _MESSAGE.seq),
    )
    due = (
        select(_MESSAGE.seq)
        .where(_is_unclaimed_for(destination), _MESSAGE.deliver_at_ms <= now_ms, ~overtakes)
        .order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows = connection.execute(
        update(scheduled_message)
        .where(_MESSAGE.seq.in_(due))
        .values(claimed_by=owner, claimed_until_ms=until_ms)
        .returning(_MESSAGE.seq, *MESSAGE_COLUMNS)
    ).all()
    claims = [Claim(seq=row.seq, message=message_of(row)) for row in rows]
    return sorted(claims, key=lambda claim: (claim.message.deliver_at, claim.seq))


def mark_dispatched(connection: Connection, claims: Sequence[Claim], *, now_ms: int) -> int:
    """Record that the other broker confirmed these messages and return how many were not marked before."""
    return len(_mark(connection, _claimed_seqs(connection, claims), now_ms=now_ms)) if claims else 0


def give_back(connection: Connection, claims: Sequence[Claim], *, owner: str) -> None:
    """End claims of messages that were not sent."""
    if claims:
        connection.execute(
            update(scheduled_message)
            .where(_claimed_seqs(connection, claims), _MESSAGE.claimed_by == owner)
            .values(claimed_by=None, claimed_until_ms=None)
        )


def rescue_stale(connection: Connection, *, now_ms: int, limit: int) -> int:
    """End the claims of dispatchers that died while sending and return how many messages wait again."""
    stale = (
        select(_MESSAGE.seq)
        .where(_MESSAGE.claimed_until_ms < now_ms, _MESSAGE.claimed_until_ms.is_not(None))
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return connection.execute(
        update(scheduled_message)
        .where(_MESSAGE.seq.in_(stale))
        .values(claimed_by=None, claimed_until_ms=None)
    ).rowcount


def put_into_channel(connection: Connection, seqs: Sequence[int], *, channel: str | None = None) -> None:
    """Make messages visible in their own channel, or in another one."""
    source = select(
        _MESSAGE.seq,
        _MESSAGE.channel if channel is None else literal(channel),
        _MESSAGE.deliver_at_ms,
        literal(0),
        literal(0),
    ).where(is_one_of(connection, _MESSAGE.seq, seqs))
    columns = ["message_seq", "channel", "deliver_at_ms", "visible_at_ms", "received_count"]
    connection.execute(insert(channel_message).from_select(columns, source))


def _deliver(connection: Connection, chosen: ColumnElement[bool], *, now_ms: int) -> list[Row[Any]]:
    moved = _mark(connection, chosen, now_ms=now_ms)
    if moved:
        put_into_channel(connection, [row.seq for row in moved])
    return moved


def _mark(connection: Connection, chosen: ColumnElement[bool], *, now_ms: int) -> list[Row[Any]]:
    moved = connection.execute(
        update(scheduled_message)
        .where(chosen, _WAITS)
        .values(
            state=State.DISPATCHED.value,
            dispatched_at_ms=now_ms,
            updated_at_ms=now_ms,
            claimed_by=None,
            claimed_until_ms=None,
        )
        .returning(*_MOVED)
    ).all()
    journal.append(connection, Change.DISPATCHED, [row.seq for row in moved], at_ms=now_ms)
    counts.apply(connection, counts.moves(moved, before=State.SCHEDULED, after=State.DISPATCHED))
    return list(moved)


def _is_unclaimed_for(destination: str) -> ColumnElement[bool]:
    return _WAITS & (_MESSAGE.destination == destination) & _MESSAGE.claimed_until_ms.is_(None)


def _claimed_seqs(connection: Connection, claims: Sequence[Claim]) -> ColumnElement[bool]:
    return is_one_of(connection, _MESSAGE.seq, [claim.seq for claim in claims])
