"""Reading the journal: dispatches are reported once their destinations have taken the messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.broker_held import REVERSIBLE, RecentOutcomes, keep_outcome
from airflow_delay_provider.brokers.rabbitmq.journal_stream import (
    BEFORE_ALL,
    SCAN_PAGE,
    PendingEntry,
    Position,
    StreamCursor,
    first_offset_since,
    format_position,
    last_offset,
    parse_position,
)
from airflow_delay_provider.brokers.rabbitmq.management import TOTALS_LAG, DispatchCheck, DispatchStatus
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.lifecycle import JOURNAL_PAGE_BYTES, Change, JournalEntry, size_of_entry

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection

#: Payloads of dispatches that may not be true yet.
MOST_OPEN_BYTES = 32 * 1024 * 1024


class JournalReader:
    """Continues from the last position as long as it is asked for what comes next, without attaching again.

    A message is reported as dispatched once its destination has it, as far as that can be known: not if it was parked,
    and, where relays can be counted, not while the relay of its channel may still have it. Until the relay is empty it
    is reported as refused, which is not an outcome. Meanwhile the returned positions stay before it, so that a reader
    who begins again there sees it.
    """

    def __init__(
        self, open_connection: Callable[[], AmqpConnection], clock: Clock, dispatch_check: DispatchCheck
    ) -> None:
        self._open_connection = open_connection
        self._clock = clock
        self._dispatch_check = dispatch_check
        self._cursor: StreamCursor | None = None
        #: The position that the caller got last, and the last one that was read.
        self._returned: Position = BEFORE_ALL
        self._read: Position = BEFORE_ALL
        self._recent = RecentOutcomes(parse_position)
        #: Dispatches that may not be true yet, by position, and when they were read; those reported as refused.
        self._open: dict[Position, tuple[JournalEntry, datetime]] = {}
        self._open_bytes = 0
        self._refused: set[Position] = set()
        #: Those of them that were found by looking back; a reader who begins again looks back again.
        self._looked_up: set[Position] = set()

    def end(self) -> str:
        """Return the position of the last record, or of one before it."""
        return format_position((last_offset(self._open_connection()) - 1, 0))

    def read(self, after: str, limit: int) -> list[JournalEntry]:
        """Return the next entries; the broker gets a moment to push them."""
        start = parse_position(after)
        cursor = self._cursor
        if cursor is None or not cursor.is_open or start != self._returned:
            cursor = self._attach(start)
        now = self._clock.now()
        entries = self._settle(limit, now)
        room = JOURNAL_PAGE_BYTES - sum(map(size_of_entry, entries))
        for pending in cursor.read(limit - len(entries), now, room=room):
            self._read = parse_position(pending.entry.position)
            if self._check(pending, by=now, now=now) is DispatchStatus.TAKEN:
                entries.append(pending.entry)
            else:
                self._keep_open(self._read, pending.entry, by=now)
                self._looked_up.discard(self._read)
        if entries:
            entries = self._before_open(entries)
            self._returned = parse_position(entries[-1].position)
            self._recent.add(entries)
        return entries

    def find(self, since: Mapping[str, str]) -> dict[str, JournalEntry]:
        """Return the first final entry of each id that is recorded after its position by now, in one look back."""
        found: dict[str, JournalEntry] = {}
        starts = {each: parse_position(position) for each, position in since.items()}
        if self._cursor is not None:
            known = [each for each, start in starts.items() if self._recent.covers(start)]
            found = self._recent.get(known)
            starts |= {each: max(starts[each], self._returned) for each in known}
        wanted = starts.keys() - {each for each, entry in found.items() if entry.change not in REVERSIBLE}
        recent: int | None = None
        for pending in self._scan(min(starts[each] for each in wanted), wanted) if wanted else ():
            entry, now = pending.entry, self._clock.now()
            position, by = parse_position(entry.position), now
            if entry.message_id not in wanted or position <= starts[entry.message_id]:
                continue
            status = self._check(pending, by=by, now=now)
            if status is DispatchStatus.UNKNOWN:
                recent = first_offset_since(self._open_connection(), now - TOTALS_LAG) if recent is None else recent
                by = now - TOTALS_LAG if position[0] < recent else now
                status = self._check(pending, by=by, now=now)
            if status is DispatchStatus.TAKEN:
                keep_outcome(found, entry)
            elif position not in self._open:
                self._keep_open(position, entry, by=by)
                self._looked_up.add(position)
        return found

    def close(self) -> None:
        """Detach from the stream."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None

    def _check(self, pending: PendingEntry, *, by: datetime, now: datetime) -> DispatchStatus:
        if not (pending.is_dispatch and pending.may_be_in_relay):
            return DispatchStatus.TAKEN
        return self._dispatch_check.check(pending.entry.channel, by=by, now=now)

    def _settle(self, limit: int, now: datetime) -> list[JournalEntry]:
        """Return what became of dispatches that were not known to be true before."""
        entries, room = list[JournalEntry](), JOURNAL_PAGE_BYTES
        for position, (entry, read_at) in list(self._open.items()):
            if len(entries) >= limit or room <= 0:
                break
            status = self._dispatch_check.check(entry.channel, by=read_at, now=now)
            if status is DispatchStatus.TAKEN:
                entries.append(replace(entry, position=format_position(self._read)))
                self._forget(position)
                room -= size_of_entry(entry)
            elif status is DispatchStatus.IN_RELAY and position not in self._refused:
                self._refused.add(position)
                entries.append(_refused(entry, now, position=self._read))
                room -= size_of_entry(entry)
        return entries

    def _keep_open(self, position: Position, entry: JournalEntry, *, by: datetime) -> None:
        self._drop_open(position)
        # A destination may refuse messages for days: beyond a bound, they are kept without their content.
        kept = entry if self._open_bytes < MOST_OPEN_BYTES else entry.without_message()
        self._open[position] = (kept, by)
        self._open_bytes += size_of_entry(kept)

    def _drop_open(self, position: Position) -> None:
        if (known := self._open.pop(position, None)) is not None:
            self._open_bytes -= size_of_entry(known[0])

    def _forget(self, position: Position) -> None:
        self._drop_open(position)
        self._refused.discard(position)
        self._looked_up.discard(position)

    def _before_open(self, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Return entries whose positions are before every open dispatch."""
        awaited = self._open.keys() - self._looked_up
        if not awaited:
            return entries
        offset, index = min(awaited)
        latest = (offset, index - 1)
        return [replace(each, position=format_position(min(parse_position(each.position), latest))) for each in entries]

    def _attach(self, start: Position) -> StreamCursor:
        self.close()
        # A journal that was deleted and created again has fewer records; a position beyond its end would never come.
        is_gone = start[0] > last_offset(self._open_connection(), at_least=start[0])
        cursor = self._cursor = StreamCursor(self._open_connection(), BEFORE_ALL if is_gone else start)
        if start != self._returned:
            self._recent = RecentOutcomes(parse_position, start)
        # These are read again.
        for position in self._open.keys() - self._looked_up:
            self._forget(position)
        self._returned = self._read = start
        return cursor

    def _scan(self, start: Position, wanted: Collection[str]) -> Iterator[PendingEntry]:
        last = last_offset(self._open_connection())
        if start[0] > last:
            return
        cursor = StreamCursor(self._open_connection(), start)
        try:
            while True:
                entries = cursor.read(SCAN_PAGE, self._clock.now())
                yield from entries
                if not entries and cursor.offset >= last and not cursor.holds_back(wanted, up_to=last):
                    return
                if not cursor.is_open:
                    raise BrokerError("the journal could not be read to its end; try again")
        finally:
            cursor.close()


def _refused(entry: JournalEntry, now: datetime, *, position: Position) -> JournalEntry:
    return replace(
        entry,
        change=Change.REFUSED,
        at=now,
        position=format_position(position),
        reason=f"channel {entry.channel!r} takes no messages: the queue is full, or the exchange routes nowhere; the"
        " broker keeps the message in the channel's relay and tries again",
    )
