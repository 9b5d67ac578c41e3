"""Dispatch due messages: into an embedded channel, or claimed for another broker."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from sqlalchemy import Connection, exists, func, literal, select, tuple_, update
from sqlalchemy.sql import ColumnElement, FromClause

from airflow_delay_provider.brokers.ledger import journal, notices
from airflow_delay_provider.brokers.ledger.dialect import is_one_of, lock_free_rows, take, upsert_into
from airflow_delay_provider.brokers.ledger.records import MESSAGE_COLUMNS, AnyRow, message_of
from airflow_delay_provider.brokers.ledger.tables import channel_message, message_count, scheduled_message
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.lifecycle import Change, State, outcome_of
from airflow_delay_provider.domain.message import Message

_MESSAGE = scheduled_message.c
_WAITS = _MESSAGE.state == State.SCHEDULED.value
_HERE = _MESSAGE.destination.is_(None)
#: Always true for embedded messages.
_HELD_BY_LEDGER = _MESSAGE.held_by_broker == 0
_IS_KEYED = _MESSAGE.key.is_not(None).label("is_keyed")
#: Most payload that is claimed, and held in memory, at once; a single larger message is claimed alone.
MOST_CLAIMED_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A message that one process may send to another broker until the claim ends."""

    seq: int
    message: Message
    #: The result of sending counts only if the message has not changed since.
    generation: int


def next_due_ms(connection: Connection, *, destination: str | None = None) -> int | None:
    """Return when the next embedded message is due, or the next one for another broker; reads an index."""
    waits = _WAITS & _HERE if destination is None else _is_unclaimed_for(destination)
    due: int | None = connection.execute(select(func.min(_MESSAGE.deliver_at_ms)).where(waits)).scalar()
    return due


def next_due_by_channel(connection: Connection, *, destination: str) -> dict[str, int | None]:
    """Return the channels of another broker that have scheduled messages, and when the next of each is due.

    None if all messages of a channel are being sent. The counts name the channels; each costs one index lookup, however
    many messages the others have.
    """
    first = (
        select(func.min(_MESSAGE.deliver_at_ms))
        .where(_is_unclaimed_for(destination), _MESSAGE.channel == message_count.c.channel)
        .scalar_subquery()
        .label("due_ms")
    )
    waiting = select(message_count.c.channel, first).where(
        message_count.c.destination == destination,
        message_count.c.state == State.SCHEDULED.value,
        message_count.c.n > 0,
    )
    return {row.channel: row.due_ms for row in connection.execute(waiting)}


def deliver_due(connection: Connection, *, now_ms: int, limit: int) -> list[AnyRow]:
    """Move due messages into their embedded channels, oldest first, and return their rows.

    Moving, marking, journal and counts are one transaction: a message is in its channel exactly when it is marked.
    """
    due = (
        select(_MESSAGE.seq, _IS_KEYED)
        .where(_WAITS, _HERE, _MESSAGE.deliver_at_ms <= now_ms)
        .order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
        .limit(limit)
    )
    return deliver_now(connection, _in_order(connection, lock_free_rows(connection, due)), now_ms=now_ms)


def deliver_now(connection: Connection, seqs: Sequence[int], *, now_ms: int) -> list[AnyRow]:
    """Move messages into their embedded channels, due or not."""
    if not seqs:
        return []
    moved = _mark(connection, seqs, Change.DISPATCHED, now_ms=now_ms)
    put_into_channel(connection, [row.seq for row in moved])
    _count(connection, moved, State.DISPATCHED)
    return moved


def behind_earlier(
    connection: Connection, seqs: Sequence[int], *, destination: str | None = None, now_ms: int
) -> set[int]:
    """Return those due messages that would overtake an earlier one of their channel and key that is not dispatched yet.

    They are left to the dispatcher, which moves both in order.
    """
    if not seqs:
        return set()
    earlier = scheduled_message.alias("earlier")
    waits = exists().where(
        *_waits_at(earlier, destination),
        earlier.c.channel == _MESSAGE.channel,
        earlier.c.key == _MESSAGE.key,
        earlier.c.deliver_at_ms <= now_ms,
        tuple_(earlier.c.deliver_at_ms, earlier.c.seq) < tuple_(_MESSAGE.deliver_at_ms, _MESSAGE.seq),
        ~is_one_of(connection, earlier.c.seq, seqs),
    )
    return set(
        connection.execute(select(_MESSAGE.seq).where(is_one_of(connection, _MESSAGE.seq, seqs), waits)).scalars()
    )


def claim_due(
    connection: Connection,
    *,
    destination: str,
    channels: Sequence[str] | None = None,
    owner: str,
    now_ms: int,
    until_ms: int,
    limit: int,
) -> list[Claim]:
    """Claim due messages for another broker, oldest first; no other process sends them until ``until_ms``.

    A message is not claimed while another process sends an earlier one of its channel and key.

    :param channels: only these, one after the other; messages of others cost nothing. None is all.
    """
    earlier = scheduled_message.alias("earlier")
    overtakes = exists().where(
        earlier.c.claimed_until_ms.is_not(None),
        earlier.c.destination == destination,
        earlier.c.channel == _MESSAGE.channel,
        earlier.c.key == _MESSAGE.key,
        tuple_(earlier.c.deliver_at_ms, earlier.c.seq) < tuple_(_MESSAGE.deliver_at_ms, _MESSAGE.seq),
    )
    due = (
        select(_MESSAGE.seq, _IS_KEYED, func.length(_MESSAGE.payload).label("size"))
        .where(_is_unclaimed_for(destination), _MESSAGE.deliver_at_ms <= now_ms, ~overtakes)
        .order_by(_MESSAGE.deliver_at_ms, _MESSAGE.seq)
    )
    room = MOST_CLAIMED_BYTES
    seqs: list[int] = []
    for query in [due] if channels is None else [due.where(_MESSAGE.channel == channel) for channel in channels]:
        if len(seqs) < limit and room > 0:
            taken = lock_free_rows(connection, query.limit(limit - len(seqs)))
            fitting = _fitting(taken, room) or ([] if seqs else list(taken[:1]))
            room -= sum(row.size for row in fitting)
            seqs += _in_order(connection, fitting, destination=destination)
    return claim_now(connection, seqs, owner=owner, until_ms=until_ms)


def _fitting(rows: Sequence[AnyRow], room: int) -> list[AnyRow]:
    """Return the first rows whose payloads fit."""
    sizes = accumulate(row.size for row in rows)
    return [row for row, size in zip(rows, sizes, strict=True) if size <= room]


def _in_order(connection: Connection, taken: Sequence[AnyRow], *, destination: str | None = None) -> list[int]:
    """Return the numbers of messages that this transaction has locked, without those that would overtake others.

    No dispatcher waits for another one. An earlier message of the same channel and key that another transaction has
    taken is still scheduled for this one until that commits: so the later one is left for the next time.
    """
    seqs = [row.seq for row in taken]
    # SQLite has one writer at a time, so nothing is taken meanwhile.
    if connection.dialect.name == "sqlite" or not any(row.is_keyed for row in taken):
        return seqs
    mine, earlier = scheduled_message.alias("mine"), scheduled_message.alias("earlier")
    is_mine = is_one_of(connection, mine.c.seq, seqs)
    overtakes = exists().where(
        *_waits_at(earlier, destination),
        # Bounds the rows that are read to those before the last one that was taken.
        earlier.c.deliver_at_ms <= select(func.max(mine.c.deliver_at_ms)).where(is_mine).scalar_subquery(),
        earlier.c.channel == _MESSAGE.channel,
        earlier.c.key == _MESSAGE.key,
        tuple_(earlier.c.deliver_at_ms, earlier.c.seq) < tuple_(_MESSAGE.deliver_at_ms, _MESSAGE.seq),
        ~is_one_of(connection, earlier.c.seq, seqs),
    )
    too_soon = select(_MESSAGE.seq).where(is_one_of(connection, _MESSAGE.seq, seqs), overtakes)
    left = set(connection.execute(too_soon).scalars())
    return [seq for seq in seqs if seq not in left]


def claim_now(connection: Connection, seqs: Sequence[int], *, owner: str, until_ms: int) -> list[Claim]:
    """Claim messages that this transaction has locked, due or not, and return them oldest first."""
    if not seqs:
        return []
    rows = connection.execute(
        update(scheduled_message)
        .where(is_one_of(connection, _MESSAGE.seq, seqs))
        .values(claimed_by=owner, claimed_until_ms=until_ms)
        .returning(_MESSAGE.seq, _MESSAGE.generation, *MESSAGE_COLUMNS)
    ).all()
    claims = [Claim(seq=row.seq, message=message_of(row), generation=row.generation) for row in rows]
    return sorted(claims, key=lambda claim: (claim.message.deliver_at, claim.seq))


def mark_dispatched(connection: Connection, claims: Sequence[Claim], *, now_ms: int) -> int:
    """Mark messages that the other broker has confirmed, and return how many were not marked before.

    A message that a consumer has already requeued is scheduled again, and stays so.
    """
    moved = _mark_claimed(connection, claims, Change.DISPATCHED, now_ms=now_ms)
    _count(connection, moved, State.DISPATCHED)
    return len(moved)


def mark_sent(connection: Connection, seqs: Sequence[int], *, now_ms: int) -> None:
    """Mark messages that have reached another broker, whichever process sent them."""
    _count(connection, _mark(connection, seqs, Change.DISPATCHED, now_ms=now_ms), State.DISPATCHED)


def mark_dead(connection: Connection, claims: Sequence[Claim], *, now_ms: int, reason: str) -> None:
    """Mark messages as dead that the other broker refuses for good."""
    moved = _mark_claimed(connection, claims, Change.DEAD_LETTERED, now_ms=now_ms, reason=reason)
    _count(connection, moved, State.DEAD)


def give_back(connection: Connection, claims: Sequence[Claim], *, owner: str, now_ms: int) -> None:
    """End claims of messages that were not sent."""
    if claims:
        connection.execute(
            update(scheduled_message)
            .where(is_one_of(connection, _MESSAGE.seq, _seqs(claims)), _MESSAGE.claimed_by == owner)
            .values(claimed_by=None, claimed_until_ms=None)
        )
        notices.announce(connection, min(ceil_ms(claim.message.deliver_at) for claim in claims), now_ms=now_ms)


def divide(claims: Sequence[Claim], *, unconfirmed: Collection[str]) -> tuple[list[Claim], list[Claim]]:
    """Return the confirmed claims and the others; an error that names no messages confirms none."""
    open_ids = set(unconfirmed) or {claim.message.id for claim in claims}
    sent = [claim for claim in claims if claim.message.id not in open_ids]
    return sent, [claim for claim in claims if claim.message.id in open_ids]


def settle(connection: Connection, *, sent: Sequence[Claim], unsent: Sequence[Claim], owner: str, now_ms: int) -> None:
    """End claims: mark what was sent, and schedule the rest again."""
    mark_dispatched(connection, sent, now_ms=now_ms)
    give_back(connection, unsent, owner=owner, now_ms=now_ms)


def rescue_stale(connection: Connection, *, now_ms: int, limit: int) -> int:
    """End the claims of dispatchers that died while sending, and return how many."""
    stale = take(
        connection,
        select(_MESSAGE.seq)
        .where(_MESSAGE.claimed_until_ms < now_ms, _MESSAGE.claimed_until_ms.is_not(None))
        .limit(limit),
    )
    if stale:
        connection.execute(
            update(scheduled_message)
            .where(is_one_of(connection, _MESSAGE.seq, stale))
            .values(claimed_by=None, claimed_until_ms=None)
        )
    return len(stale)


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
    statement = upsert_into(connection.dialect.name, channel_message).from_select(columns, source)
    # If a consumer scheduled it again without acknowledging it, the earlier delivery ends here.
    newer = {name: statement.excluded[name] for name in columns[1:]} | {"handle": None}
    connection.execute(statement.on_conflict_do_update(index_elements=["message_seq"], set_=newer))


def _mark_claimed(
    connection: Connection, claims: Sequence[Claim], change: Change, *, now_ms: int, reason: str | None = None
) -> list[AnyRow]:
    moved: list[AnyRow] = []
    # Nearly always one statement: only rescheduled or requeued messages have another generation.
    for generation, same in groupby(sorted(claims, key=_generation), key=_generation):
        unchanged = _MESSAGE.generation == generation
        moved += _mark(connection, _seqs(same), change, unchanged, now_ms=now_ms, reason=reason)
    return moved


def _mark(
    connection: Connection,
    seqs: Sequence[int],
    change: Change,
    *conditions: ColumnElement[bool],
    now_ms: int,
    reason: str | None = None,
) -> list[AnyRow]:
    state = outcome_of(change)
    moved = connection.execute(
        update(scheduled_message)
        .where(is_one_of(connection, _MESSAGE.seq, seqs), _WAITS, *conditions)
        .values(
            state=state.value,
            dispatched_at_ms=now_ms if state is State.DISPATCHED else None,
            updated_at_ms=now_ms,
            claimed_by=None,
            claimed_until_ms=None,
        )
        .returning(_MESSAGE.seq, _MESSAGE.channel, _MESSAGE.destination, _MESSAGE.deliver_at_ms)
    ).all()
    journal.append(connection, change, [row.seq for row in moved], at_ms=now_ms, reason=reason)
    return list(moved)


def _count(connection: Connection, moved: Sequence[AnyRow], state: State) -> None:
    journal.add_counts(connection, journal.count_moves(moved, before=State.SCHEDULED, after=state))


def _is_unclaimed_for(destination: str) -> ColumnElement[bool]:
    return _WAITS & (_MESSAGE.destination == destination) & _MESSAGE.claimed_until_ms.is_(None) & _HELD_BY_LEDGER


def _waits_at(table: FromClause, destination: str | None) -> list[ColumnElement[bool]]:
    """Match messages that the ledger holds for a destination and that are not dispatched, claimed or not."""
    columns = table.c
    return [
        columns.state == State.SCHEDULED.value,
        columns.destination.is_(None) if destination is None else columns.destination == destination,
        columns.held_by_broker == 0,
    ]


def _seqs(claims: Iterable[Claim]) -> list[int]:
    return [claim.seq for claim in claims]


def _generation(claim: Claim) -> int:
    return claim.generation
