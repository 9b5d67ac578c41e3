"""The journal as a RabbitMQ stream: attaching to it, decoding its records, and holding back dispatches for a moment.

The broker itself writes the records: when messages are published, dispatched and parked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.rabbitmq.dispatch_times import DispatchTimes, offset_of
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.brokers.rabbitmq.names import is_parked_exchange
from airflow_delay_provider.brokers.rabbitmq.receive import AmqpMessage, ConsumerChannel
from airflow_delay_provider.brokers.rabbitmq.topology import is_exchange
from airflow_delay_provider.brokers.rabbitmq.wire import CHANNEL, DecodedMessage, decode_message
from airflow_delay_provider.domain.exceptions import BrokerError, InvalidMessageError
from airflow_delay_provider.domain.lifecycle import (
    JOURNAL_PAGE_BYTES,
    TIME_UNKNOWN,
    Change,
    JournalEntry,
    size_of_entry,
)

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection

#: Records that the broker sends ahead. They carry their messages, so this is memory, too.
PREFETCH = 100
ACK_EVERY = 50
#: Entries that a search for earlier outcomes reads at once.
SCAN_PAGE = 1000
#: How long the broker may take to push records that it has: the first ones, and more.
FIRST_SECONDS = 0.5
NEXT_SECONDS = 0.03
#: How long a busy broker may take for records that exist for sure, unless the journal was created again.
SURE_SECONDS = 5.0
#: How long the record of a parking may take after that of the publish which found no queue. Measured: 5 to 30 ms.
PARKED_SECONDS = 0.5
#: A record of a parking comes at most this many records after the dispatch: both are written within milliseconds.
LOOK_AHEAD = 1000
#: Rounds of up to ``PREFETCH`` records in which the end of the journal is looked for.
NEWEST_ROUNDS = 200

#: Offset in the stream, and the index among the entries of one record.
Position = tuple[int, int]
BEFORE_ALL: Position = (-1, 0)


def parse_position(text: str) -> Position:
    """Return the offset and index of a position."""
    if not text:
        return BEFORE_ALL
    offset, _, index = text.partition(".")
    try:
        return int(offset), int(index)
    except ValueError:
        raise InvalidMessageError(
            "position", f"{text!r} is not a position of this journal", "use one that the journal has returned"
        ) from None


def format_position(position: Position) -> str:
    """Return a position as text."""
    return f"{position[0]}.{position[1]}"


# -- reading the stream --------------------------------------------------------------------------------------------


def _attach(connection: AmqpConnection, *, prefetch: int, offset: int | str | datetime) -> ConsumerChannel:
    consumer = ConsumerChannel(connection, connection.config.topology.journal_name)
    consumer.begin(prefetch=prefetch, **{"x-stream-offset": offset})
    return consumer


def first_offset_since(connection: AmqpConnection, moment: datetime) -> int:
    """Return an offset before which all records are older than a moment; the broker knows it to the chunk."""
    consumer = _attach(connection, prefetch=1, offset=moment)
    try:
        received = consumer.take(1, wait=FIRST_SECONDS)
        return offset_of(received[0]) if received else last_offset(connection) + 1
    finally:
        consumer.close()


def last_offset(connection: AmqpConnection, *, at_least: int = -1) -> int:
    """Return an offset in the last chunk of the stream, ``at_least`` if it exists; an empty stream gets a record."""
    consumer = _attach(connection, prefetch=PREFETCH if at_least >= 0 else 1, offset="last")
    try:
        # A journal is created with a first record, so wait before concluding that it is empty.
        received = consumer.take(1, wait=SURE_SECONDS)
        if not received:
            consumer.channel.send("basic_publish", exchange=consumer.queue, routing_key="", body=b"")
            received = consumer.take(1, wait=connection.config.connect_seconds)
        if not received and consumer.channel.closed is not None:
            raise translate(consumer.channel.closed, connection.config)
        if not received:
            raise BrokerError(
                f"{connection.config.name}: the journal {consumer.queue} does not answer; check that the stream is"
                " healthy"
            )
        while offset_of(received[-1]) < at_least and (more := consumer.take(PREFETCH, wait=SURE_SECONDS)):
            consumer.ack(more[-1].tag, multiple=True)
            received = more
        return offset_of(received[-1])
    finally:
        consumer.close()


def newest_offset(connection: AmqpConnection) -> int:
    """Return the offset of the last record; one that is written meanwhile may be behind it."""
    newest = last_offset(connection)
    consumer = _attach(connection, prefetch=PREFETCH, offset=newest)
    try:
        # The broker pushes a chunk at once. A busy journal never falls silent, so the number of rounds is bounded.
        for _ in range(NEWEST_ROUNDS):
            received = consumer.take(PREFETCH, wait=FIRST_SECONDS)
            if not received:
                break
            newest = offset_of(received[-1])
            consumer.ack(received[-1].tag, multiple=True)
        return newest
    finally:
        consumer.close()


class StreamCursor:
    """Reads the stream from one position on."""

    def __init__(self, connection: AmqpConnection, after: Position) -> None:
        self.offset = after[0]
        self._after = after
        self._is_fresh = True
        self._unacked = 0
        offset = max(after[0], 0) if after != BEFORE_ALL else "first"
        self._consumer = _attach(connection, prefetch=PREFETCH, offset=offset)
        self._times = DispatchTimes(partial(first_offset_since, connection))
        self._buffer = EntryBuffer()

    @property
    def is_open(self) -> bool:
        """Whether records can come, as far as known."""
        return self._consumer.is_open

    def read(self, limit: int, now: datetime, *, room: int = JOURNAL_PAGE_BYTES) -> list[PendingEntry]:
        """Return the next entries, up to ``limit`` and ``room`` bytes; give the broker a moment to push them."""
        is_first, self._is_fresh = self._is_fresh, False
        self._take(limit + LOOK_AHEAD, now, wait=FIRST_SECONDS if is_first else NEXT_SECONDS)
        entries = self._buffer.release(limit, room)
        room -= sum(size_of_entry(pending.entry) for pending in entries)
        if is_first and self._buffer and len(entries) < limit and room > 0:
            # A reader that begins at the same position again and again would never see a dispatch that is held back.
            time.sleep(PARKED_SECONDS)
            self._take(limit + LOOK_AHEAD, now, wait=0)
            entries += self._buffer.release(limit - len(entries), room)
        return entries

    def holds_back(self, message_ids: Collection[str] | None, *, up_to: int) -> bool:
        """Whether an entry of these messages, or of any, that was recorded up to an offset is still held back."""
        return any(
            (message_ids is None or pending.entry.message_id in message_ids)
            and parse_position(pending.entry.position)[0] <= up_to
            for pending in self._buffer
        )

    def close(self) -> None:
        """Detach from the stream."""
        self._consumer.close()

    def _take(self, most: int, now: datetime, *, wait: float) -> None:
        """Buffer what the broker pushes, up to ``most`` entries."""
        while self._buffer.has_room(most) and (received := self._consumer.take(PREFETCH, wait=wait)):
            wait = NEXT_SECONDS
            for record in received:
                self.offset = max(self.offset, offset_of(record))
                for pending in decode_record(record, now, self._times):
                    if parse_position(pending.entry.position) > self._after:
                        self._buffer.add(pending)
            self._unacked += len(received)
            if self._unacked >= ACK_EVERY:
                self._consumer.ack(received[-1].tag, multiple=True)
                self._unacked = 0


# -- holding back dispatches ---------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class PendingEntry:
    """An entry of the journal that may still turn out to be untrue."""

    entry: JournalEntry
    #: The destination may have refused the message, which is in its relay then.
    may_be_in_relay: bool = False
    #: When this client read it, by a monotonic clock.
    seen: float = 0.0
    was_parked: bool = False
    #: The broker knows the time of what it did itself only to the second.
    is_exact: bool = True

    @property
    def is_dispatch(self) -> bool:
        """Whether it says that the message reached its channel."""
        return self.entry.change is Change.DISPATCHED


class EntryBuffer:
    """Entries in order. A dispatch is released after a moment, and never if the message was parked.

    The broker publishes a message to its queue and to the journal at once. If the queue is gone, the message is parked,
    and a second record says so. Both records pass a queue, so either may come first.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._entries: deque[PendingEntry] = deque()
        self._bytes = 0
        #: The last dispatch of each message that is held back.
        self._dispatched: dict[str, PendingEntry] = {}
        #: Recently parked messages without a dispatch before.
        self._parked: dict[str, None] = {}

    def __iter__(self) -> Iterator[PendingEntry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, most: int) -> bool:
        """Whether fewer than ``most`` entries are held back, and not too many bytes."""
        return len(self._entries) < most and self._bytes < 2 * JOURNAL_PAGE_BYTES

    def add(self, pending: PendingEntry) -> None:
        """Append the next entry."""
        pending.seen = self._monotonic()
        name = pending.entry.message_id
        match pending.entry.change:
            case Change.DISPATCHED if pending.may_be_in_relay and name in self._parked:
                del self._parked[name]
                return
            case Change.DISPATCHED:
                self._dispatched[name] = pending
            case Change.PARKED if dispatch := self._dispatched.pop(name, None):
                dispatch.was_parked = True
            case Change.PARKED:
                self._parked[name] = None
                if len(self._parked) > LOOK_AHEAD:
                    del self._parked[next(iter(self._parked))]
            case Change.SCHEDULED | Change.REQUEUED:
                self._parked.pop(name, None)
        self._entries.append(pending)
        self._bytes += size_of_entry(pending.entry)

    def release(self, limit: int, room: int = JOURNAL_PAGE_BYTES) -> list[PendingEntry]:
        """Return the next entries that are known to be true, up to ``limit``, until they fill ``room`` bytes."""
        released: list[PendingEntry] = []
        seen_before = self._monotonic() - PARKED_SECONDS
        while self._entries and len(released) < limit and room > 0:
            first = self._entries[0]
            is_open = first.is_dispatch and not first.was_parked and first.seen > seen_before
            if is_open and len(self._entries) <= LOOK_AHEAD:
                break
            self._entries.popleft()
            self._bytes -= size_of_entry(first.entry)
            if self._dispatched.get(first.entry.message_id) is first:
                del self._dispatched[first.entry.message_id]
            if not first.was_parked:
                released.append(first)
                room -= size_of_entry(first.entry)
        return released


# -- decoding records ----------------------------------------------------------------------------------------------


def decode_record(record: AmqpMessage, now: datetime, times: DispatchTimes) -> list[PendingEntry]:
    """Return the entries that one record of the stream stands for.

    A message without a delay has one record: scheduling it dispatches it. It goes straight to a queue, and a refusal
    reaches its publisher.
    """
    if CHANNEL not in (record.properties.headers or {}):
        return []
    decoded = decode_message(record.properties, record.body, queue="journal", now=now)
    scheduled_at = decoded.scheduled_at or decoded.message.deliver_at
    if is_parked_exchange(record.exchange):
        parked = _entry(decoded, Change.PARKED, times.received(record, now), record)
        return [PendingEntry(entry=parked, is_exact=False)]
    if record.exchange.endswith(".ingress.now"):
        may_be_in_relay = is_exchange(decoded.message.channel)
        return [
            PendingEntry(entry=_entry(decoded, change, scheduled_at, record, index), may_be_in_relay=may_be_in_relay)
            for index, change in enumerate(_changes_at_once(decoded.change))
        ]
    if ".ingress." in record.exchange:
        return [PendingEntry(entry=_entry(decoded, decoded.change or Change.SCHEDULED, scheduled_at, record))]
    at = times.find(record, due=decoded.message.deliver_at, now=now)
    dispatched = _entry(decoded, Change.DISPATCHED, at or decoded.message.deliver_at, record)
    known = dispatched if at else replace(dispatched, reason=TIME_UNKNOWN)
    return [PendingEntry(entry=known, may_be_in_relay=True, is_exact=False)]


def _changes_at_once(change: Change | None) -> tuple[Change, ...]:
    if change is Change.DEAD_LETTERED:
        return (Change.DEAD_LETTERED,)
    return (Change.REQUEUED, Change.DISPATCHED) if change is Change.REQUEUED else (Change.DISPATCHED,)


def _entry(decoded: DecodedMessage, change: Change, at: datetime, record: AmqpMessage, index: int = 0) -> JournalEntry:
    return JournalEntry(
        message_id=decoded.message.id,
        change=change,
        at=at,
        channel=decoded.message.channel,
        deliver_at=decoded.message.deliver_at,
        position=format_position((offset_of(record), index)),
        reason=_reason(decoded, change),
        message=decoded.message,
    )


def _reason(decoded: DecodedMessage, change: Change) -> str | None:
    if change is Change.PARKED:
        return (
            f"channel {decoded.message.channel!r} did not exist, so the message is parked; create the channel again,"
            " then run `airflow delay topology replay-parked`"
        )
    return decoded.reason if change is not Change.DISPATCHED else None
