"""Channels: the embedded ones, and what consumers of any broker do with messages that the ledger dispatched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import Connection, case, delete, func, select, union_all, update
from sqlalchemy.sql import Select

from airflow_delay_provider.brokers.ledger import delivery, journal, notices, scheduling
from airflow_delay_provider.brokers.ledger.dialect import is_one_of, take
from airflow_delay_provider.brokers.ledger.records import MESSAGE_COLUMNS, AnyRow, message_of
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED, channel_message, message_count, scheduled_message
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import LifecycleError
from airflow_delay_provider.domain.lifecycle import Change, State, allowed_from, outcome_of
from airflow_delay_provider.domain.message import Delivery, Message

_MESSAGE = scheduled_message.c
_QUEUED = channel_message.c

#: SQLite puts at most 500 queries together.
CHANNELS_AT_ONCE = 200


def receive(connection: Connection, channel: str, *, limit: int, now_ms: int, visible_again_ms: int) -> list[Delivery]:
    """Return visible messages in due order; a message that is delivered again unsettled counts as handled once more."""
    token = str(uuid4())
    taken = take(connection, _visible(channel, now_ms, limit))
    if not taken:
        return []
    connection.execute(
        update(channel_message)
        .where(is_one_of(connection, _QUEUED.message_seq, taken))
        .values(handle=token, visible_at_ms=visible_again_ms, received_count=_QUEUED.received_count + 1)
    )
    return [Delivery(message=message, handle=f"{seq}:{token}") for seq, message in _messages(connection, taken)]


def is_empty(connection: Connection, channel: str, *, now_ms: int) -> bool:
    """Return whether no message could be received now; reads an index."""
    return connection.execute(_visible(channel, now_ms, 1)).first() is None


def depths(connection: Connection, channel: str | None = None) -> dict[str, int]:
    """Return how many messages each embedded channel has: those that were dispatched and are not acknowledged yet.

    It reads an index entry for each of them. Channels that never had a message are missing.
    """
    known = select(message_count.c.channel).where(message_count.c.destination == EMBEDDED).distinct()
    depth = select(_QUEUED.channel, func.count()).group_by(_QUEUED.channel)
    if channel is not None:
        known, depth = known.where(message_count.c.channel == channel), depth.where(_QUEUED.channel == channel)
    return dict.fromkeys(connection.execute(known).scalars(), 0) | {row[0]: row[1] for row in connection.execute(depth)}


def peek(connection: Connection, channel: str, *, limit: int, now_ms: int) -> list[Message]:
    """Return visible messages in due order, and leave them in the channel."""
    seqs = list(connection.execute(_visible(channel, now_ms, limit)).scalars())
    return [message for _, message in _messages(connection, seqs)]


class Visible(NamedTuple):
    """A message that could be received: its number, and how often it was delivered."""

    seq: int
    received_count: int


def visible(connection: Connection, limits: Mapping[str, int], *, now_ms: int) -> dict[str, list[Visible]]:
    """Return the messages that could be received from each channel, up to its limit, in due order.

    One statement for up to ``CHANNELS_AT_ONCE`` channels, which reads an index only.
    """
    found: dict[str, list[Visible]] = {channel: [] for channel in limits}
    for names in _batches(limits):
        heads = [
            select(_QUEUED.channel, _QUEUED.message_seq, _QUEUED.received_count, _QUEUED.deliver_at_ms)
            .where(_QUEUED.channel == name, _QUEUED.visible_at_ms <= now_ms)
            .order_by(_QUEUED.deliver_at_ms, _QUEUED.message_seq)
            .limit(limits[name])
            .subquery()
            for name in names
        ]
        everything = union_all(*(select(head) for head in heads)).subquery()
        query = select(everything).order_by(everything.c.deliver_at_ms, everything.c.message_seq)
        for row in connection.execute(query):
            found[row.channel].append(Visible(row.message_seq, row.received_count))
    return found


def messages(connection: Connection, wanted: Sequence[Visible]) -> dict[Visible, Message]:
    """Return the content of those messages that are still there."""
    counts = dict(wanted)
    return {Visible(seq, counts[seq]): message for seq, message in _messages(connection, list(counts))}


def ack(connection: Connection, deliveries: Iterable[Delivery]) -> set[str]:
    """Remove handled messages; return the handles whose visibility had ended."""
    return _settle(connection, deliveries, lambda mine: delete(channel_message).where(mine))


def release(connection: Connection, deliveries: Iterable[Delivery], *, visible_at_ms: int) -> set[str]:
    """Release messages as if they had not been delivered; return the handles whose visibility had ended."""
    back = update(channel_message).values(
        handle=None, visible_at_ms=visible_at_ms, received_count=_QUEUED.received_count - 1
    )
    return _settle(connection, deliveries, back.where)


def requeue(connection: Connection, item: Delivery, *, deliver_at_ms: int, now_ms: int, reason: str | None) -> None:
    """Schedule a message again for its own channel; one that is due goes straight into it."""
    seq = _take_back(connection, item)
    put_back(connection, seq, item.message, deliver_at_ms=deliver_at_ms, now_ms=now_ms, reason=reason)
    if deliver_at_ms <= now_ms and not delivery.behind_earlier(connection, [seq], now_ms=now_ms):
        delivery.deliver_now(connection, [seq], now_ms=now_ms)


def dead_letter(connection: Connection, item: Delivery, *, channel: str, now_ms: int, reason: str) -> None:
    """Move a message to the dead-letter channel; its row keeps its own channel."""
    seq = _take_back(connection, item)
    give_up(connection, seq, item.message, now_ms=now_ms, reason=reason)
    delivery.put_into_channel(connection, [seq], channel=channel)


def visibility_ended(item: Delivery) -> LifecycleError:
    """Return the error for settling a message that another consumer may have by now."""
    return LifecycleError(
        item.message.id,
        "may be delivered again since its visibility ended; settle sooner or raise visibility",
    )


def _visible(channel: str, now_ms: int, limit: int) -> Select[int]:
    return (
        select(_QUEUED.message_seq)
        .where(_QUEUED.channel == channel, _QUEUED.visible_at_ms <= now_ms)
        .order_by(_QUEUED.deliver_at_ms, _QUEUED.message_seq)
        .limit(limit)
    )


def _messages(connection: Connection, seqs: Sequence[int]) -> list[tuple[int, Message]]:
    if not seqs:
        return []
    query = (
        select(_MESSAGE.seq, _QUEUED.received_count, *MESSAGE_COLUMNS)
        .join_from(channel_message, scheduled_message, _MESSAGE.seq == _QUEUED.message_seq)
        .where(is_one_of(connection, _QUEUED.message_seq, seqs))
        .order_by(_QUEUED.deliver_at_ms, _QUEUED.message_seq)
    )
    return [
        (row.seq, message_of(row, extra_handled=max(0, row.received_count - 1))) for row in connection.execute(query)
    ]


def _settle(connection: Connection, deliveries: Iterable[Delivery], statement_for: Any) -> set[str]:
    ended: set[str] = set()
    by_token = sorted((_split(item.handle) for item in deliveries), key=lambda handle: handle[1])
    for token, handles in groupby(by_token, key=lambda handle: handle[1]):
        seqs = [seq for seq, _ in handles]
        mine = is_one_of(connection, _QUEUED.message_seq, seqs) & (_QUEUED.handle == token)
        settled = connection.execute(statement_for(mine).returning(_QUEUED.message_seq)).scalars()
        ended.update(f"{seq}:{token}" for seq in set(seqs) - set(settled))
    return ended


def _take_back(connection: Connection, item: Delivery) -> int:
    if ack(connection, [item]):
        raise visibility_ended(item)
    return _split(item.handle)[0]


def _split(handle: str) -> tuple[int, str]:
    seq, _, token = handle.partition(":")
    return int(seq), token


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, CHANNELS_AT_ONCE)):
        yield batch


def put_back(
    connection: Connection, seq: int, message: Message, *, deliver_at_ms: int, now_ms: int, reason: str | None
) -> None:
    """Schedule a message again for its own channel.

    A dead letter starts with a count of 0: with its old count it would become dead at once.
    """
    handled = case((_MESSAGE.state == State.DEAD.value, 0), else_=message.handled_count + 1)
    # From now on the ledger holds it, even if its broker did so before.
    values = {
        "deliver_at_ms": deliver_at_ms,
        "handled_count": handled,
        "dispatched_at_ms": None,
        "held_by_broker": 0,
    }
    notices.announce(connection, deliver_at_ms, now_ms=now_ms)
    _change(connection, seq, message, Change.REQUEUED, values, now_ms=now_ms, reason=reason)


def give_up(connection: Connection, seq: int, message: Message, *, now_ms: int, reason: str) -> None:
    """Mark a message as dead; it keeps its own channel."""
    values = {"handled_count": message.handled_count}
    _change(connection, seq, message, Change.DEAD_LETTERED, values, now_ms=now_ms, reason=reason)


def put_back_from(
    connection: Connection,
    message: Message,
    *,
    destination: str,
    deliver_at_ms: int,
    now_ms: int,
    reason: str | None,
) -> int | None:
    """Schedule a message of another broker again for its own channel, and return its number.

    None if it was cancelled, or if another copy was requeued before. A message that the ledger does not know was
    pruned, or came into that channel without the ledger: it is stored as a new one.
    """
    row = _find_dispatched(connection, message, destination=destination, now_ms=now_ms)
    if row is None:
        again = message.requeued(from_ms(deliver_at_ms))
        fresh = scheduling.insert(
            connection, [again], destination=destination, on_conflict=OnConflict.KEEP, now_ms=now_ms, reason=reason
        )
        return fresh[again.id].seq if fresh else None
    if State(row.state) not in allowed_from(Change.REQUEUED):
        return None
    put_back(connection, row.seq, message, deliver_at_ms=deliver_at_ms, now_ms=now_ms, reason=reason)
    seq: int = row.seq
    return seq


def give_up_at(connection: Connection, message: Message, *, destination: str, now_ms: int, reason: str) -> None:
    """Mark a message as dead that is in the dead-letter channel of another broker, if it was dispatched."""
    row = _find_dispatched(connection, message, destination=destination, now_ms=now_ms)
    if row is not None and row.state == State.DISPATCHED:
        give_up(connection, row.seq, message, now_ms=now_ms, reason=reason)


def _find_dispatched(connection: Connection, message: Message, *, destination: str, now_ms: int) -> AnyRow | None:
    """Return the row of a message that a consumer of another broker has received.

    So it was dispatched, even if the process that sent it has not marked it, or died before: mark it first. A row with
    a higher count was requeued since, so it is scheduled.
    """
    query = (
        select(_MESSAGE.seq, _MESSAGE.state, _MESSAGE.handled_count)
        .where(_MESSAGE.id == message.id, _MESSAGE.channel == message.channel, _MESSAGE.destination == destination)
        .with_for_update()
    )
    row = connection.execute(query).one_or_none()
    if row is None or row.state != State.SCHEDULED or row.handled_count > message.handled_count:
        return row
    delivery.mark_sent(connection, [row.seq], now_ms=now_ms)
    return connection.execute(query).one()


def _change(
    connection: Connection,
    seq: int,
    message: Message,
    change: Change,
    values: dict[str, Any],
    *,
    now_ms: int,
    reason: str | None,
) -> None:
    row = connection.execute(
        select(_MESSAGE.seq, _MESSAGE.channel, _MESSAGE.destination, _MESSAGE.state).where(_MESSAGE.seq == seq)
    ).one()
    before = State(row.state)
    if before not in allowed_from(change):
        raise LifecycleError(message.id, f"is {before.name} and cannot be {change.value}")
    after = outcome_of(change)
    connection.execute(
        update(scheduled_message)
        .where(_MESSAGE.seq == seq)
        .values(values | {"state": after.value, "updated_at_ms": now_ms, "generation": _MESSAGE.generation + 1})
    )
    journal.append(connection, change, [seq], at_ms=now_ms, reason=reason)
    journal.add_counts(connection, journal.count_moves([row], before=before, after=after))
