"""The embedded channels: hand out, settle, put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import Connection, delete, select, union_all, update
from sqlalchemy.sql import Select

from airflow_delay_provider.domain.message import Delivery, Message
from airflow_delay_provider.exceptions import LifecycleError
from airflow_delay_provider.ledger import consumed, delivery
from airflow_delay_provider.ledger.dialect import is_one_of, take
from airflow_delay_provider.ledger.records import MESSAGE_COLUMNS, message_of
from airflow_delay_provider.ledger.tables import channel_message, scheduled_message

_MESSAGE = scheduled_message.c
_QUEUED = channel_message.c

#: SQLite puts at most 500 queries together.
CHANNELS_AT_ONCE = 200


def receive(connection: Connection, channel: str, *, limit: int, now_ms: int, visible_again_ms: int) -> list[Delivery]:
    """Hand out visible messages in due order; a message that comes again unsettled counts as handled once more."""
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
    """Say whether nothing could be received now; one look at an index."""
    return connection.execute(_visible(channel, now_ms, 1)).first() is None


def peek(connection: Connection, channel: str, *, limit: int, now_ms: int) -> list[Message]:
    """Return visible messages in due order and leave them."""
    seqs = list(connection.execute(_visible(channel, now_ms, limit)).scalars())
    return [message for _, message in _messages(connection, seqs)]


class Visible(NamedTuple):
    """A message that could be received, by its number and how often it was handed out."""

    seq: int
    received_count: int


def visible(connection: Connection, limits: Mapping[str, int], *, now_ms: int) -> dict[str, list[Visible]]:
    """Return what could be received from the head of each channel, up to its limit, in due order.

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
    """Return the content of messages, those that are still there as they were seen."""
    counts = dict(wanted)
    return {Visible(seq, counts[seq]): message for seq, message in _messages(connection, list(counts))}


def ack(connection: Connection, deliveries: Iterable[Delivery]) -> set[str]:
    """Remove handled messages and return the handles that had ended before."""
    return _settle(connection, deliveries, lambda mine: delete(channel_message).where(mine))


def release(connection: Connection, deliveries: Iterable[Delivery], *, visible_at_ms: int) -> set[str]:
    """Give messages back as if they had not been handed out and return the handles that had ended before."""
    back = update(channel_message).values(
        handle=None, visible_at_ms=visible_at_ms, received_count=_QUEUED.received_count - 1
    )
    return _settle(connection, deliveries, back.where)


def requeue(connection: Connection, item: Delivery, *, deliver_at_ms: int, now_ms: int, reason: str | None) -> None:
    """Let a message wait again for its own channel; one that is due already goes straight back into it."""
    seq = _take_back(connection, item)
    consumed.put_back(connection, seq, item.message, deliver_at_ms=deliver_at_ms, now_ms=now_ms, reason=reason)
    if deliver_at_ms <= now_ms and not delivery.behind_earlier(connection, [seq], now_ms=now_ms):
        delivery.deliver_now(connection, [seq], now_ms=now_ms)


def dead_letter(connection: Connection, item: Delivery, *, channel: str, now_ms: int, reason: str) -> None:
    """Move a message to the dead-letter channel; it stays known under its own channel."""
    seq = _take_back(connection, item)
    consumed.give_up(connection, seq, item.message, now_ms=now_ms, reason=reason)
    delivery.put_into_channel(connection, [seq], channel=channel)


def visibility_ended(item: Delivery) -> LifecycleError:
    """Return the error for settling a message that may be in other hands by now."""
    return LifecycleError(
        item.message.id,
        "may be handed out again since its visibility ended; settle sooner or raise visibility",
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
