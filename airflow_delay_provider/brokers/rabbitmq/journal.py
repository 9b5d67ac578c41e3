"""The journal: a stream that the broker itself fills at the entries, with each dispatch, and when it parks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.rabbitmq.consuming import Consumption, Pushed
from airflow_delay_provider.brokers.rabbitmq.dispatches import LOOK_AHEAD, PARKED_SECONDS, Dispatches, Told
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.brokers.rabbitmq.relays import TOTALS_LAG, Relays, Verdict
from airflow_delay_provider.brokers.rabbitmq.topology import is_aside, is_exchange
from airflow_delay_provider.brokers.rabbitmq.wire import CHANNEL, Wired, read_message
from airflow_delay_provider.brokers.recent_outcomes import WAYS_BACK, RecentOutcomes, note_outcome
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.exceptions import BrokerError, InvalidMessageError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.session import Session

PREFETCH = 1000
ACK_EVERY = 500
#: How long the broker may take to push what is there; more may follow within the second time.
FIRST_SECONDS = 0.5
NEXT_SECONDS = 0.03
#: How long a busy broker may take for records that are there for sure, unless the journal was made anew.
SURE_SECONDS = 5.0
ONE_SECOND = timedelta(seconds=1)

#: Offset in the stream, and which of the entries that stand for one record.
Position = tuple[int, int]
BEFORE_ALL: Position = (-1, 0)


class JournalReader:
    """Reads on from a position for as long as it is asked for what comes next, without attaching anew each time.

    A message is told to be dispatched once its destination has it, as far as that can be known: not if it was parked,
    and, where the relays can be looked at, not while the relay of its channel may still hold it. Such a message is told
    to be refused, which is no end, and to be dispatched when the relay is empty. Until then the positions that are
    given out stay in front of it, so that one who begins again there hears of it.
    """

    def __init__(self, open_session: Callable[[], Session], clock: Clock, relays: Relays) -> None:
        self._open_session = open_session
        self._clock = clock
        self._relays = relays
        self._cursor: _Cursor | None = None
        #: The position that the caller was given last, and the last one that was read.
        self._told: Position = BEFORE_ALL
        self._read: Position = BEFORE_ALL
        self._memory = RecentOutcomes(parse_position)
        #: Dispatches that may not be true yet, by their positions, and when they were read; those told to be refused.
        self._open: dict[Position, tuple[JournalEntry, datetime]] = {}
        self._refused: set[Position] = set()
        #: Those of them that were found by looking back; whoever begins again looks back again.
        self._looked_up: set[Position] = set()

    def end(self) -> str:
        """Return the position of the last record there is, or of one before it."""
        return _text((self._last_offset() - 1, 0))

    def read(self, after: str, limit: int) -> list[JournalEntry]:
        """Return the next entries; the broker is given a moment to push them."""
        start = parse_position(after)
        cursor = self._cursor
        if cursor is None or not cursor.is_open or start != self._told:
            cursor = self._attach(start)
        now = self._clock.now()
        entries = self._settle(limit, now)
        for told in cursor.read(limit - len(entries), now):
            self._read = parse_position(told.entry.position)
            if self._judge(told, by=now, now=now) is Verdict.TAKEN:
                entries.append(told.entry)
            else:
                self._open[self._read] = (told.entry, now)
                self._looked_up.discard(self._read)
        if entries:
            entries = self._placed(entries)
            self._told = parse_position(entries[-1].position)
            self._memory.add(entries)
        return entries

    def find(self, message_ids: Sequence[str], since: str) -> dict[str, JournalEntry]:
        """Return the first final entry of each of these ids that is recorded behind ``since`` by now."""
        found: dict[str, JournalEntry] = {}
        start = parse_position(since)
        if self._cursor is not None and self._memory.covers(start):
            found = self._memory.get(message_ids)
            start = max(start, self._told)
        wanted = set(message_ids) - {each for each, entry in found.items() if entry.change not in WAYS_BACK}
        recent: int | None = None
        for told in self._scan(start, wanted) if wanted else ():
            entry, now = told.entry, self._clock.now()
            if entry.message_id not in wanted:
                continue
            position, by = parse_position(entry.position), now
            verdict = self._judge(told, by=by, now=now)
            if verdict is Verdict.UNKNOWN:
                recent = self._first_offset_since(now - TOTALS_LAG) if recent is None else recent
                by = now - TOTALS_LAG if position[0] < recent else now
                verdict = self._judge(told, by=by, now=now)
            if verdict is Verdict.TAKEN:
                note_outcome(found, entry)
            elif position not in self._open:
                self._open[position] = (entry, by)
                self._looked_up.add(position)
        return found

    def _judge(self, told: Told, *, by: datetime, now: datetime) -> Verdict:
        if not (told.is_dispatch and told.may_be_held):
            return Verdict.TAKEN
        return self._relays.judge(told.entry.channel, by=by, now=now)

    def _settle(self, limit: int, now: datetime) -> list[JournalEntry]:
        """Return what became of dispatches that were not known to be true before."""
        entries: list[JournalEntry] = []
        for position, (entry, read_at) in list(self._open.items()):
            if len(entries) >= limit:
                break
            verdict = self._relays.judge(entry.channel, by=read_at, now=now)
            if verdict is Verdict.TAKEN:
                entries.append(replace(entry, position=_text(self._read)))
                self._forget(position)
            elif verdict is Verdict.HELD and position not in self._refused:
                self._refused.add(position)
                entries.append(_refused(entry, now, position=self._read))
        return entries

    def _forget(self, position: Position) -> None:
        self._open.pop(position, None)
        self._refused.discard(position)
        self._looked_up.discard(position)

    def _placed(self, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Let nobody begin again behind a dispatch that is open."""
        awaited = self._open.keys() - self._looked_up
        if not awaited:
            return entries
        offset, index = min(awaited)
        latest = (offset, index - 1)
        return [replace(each, position=_text(min(parse_position(each.position), latest))) for each in entries]

    def close(self) -> None:
        """Let go of the stream."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None

    def _attach(self, start: Position) -> _Cursor:
        self.close()
        # A journal that was deleted and created again begins anew; whoever waits for a place behind its end waits long.
        is_gone = start[0] > self._last_offset(at_least=start[0])
        cursor = self._cursor = _Cursor(self._open_session(), BEFORE_ALL if is_gone else start)
        if start != self._told:
            self._memory = RecentOutcomes(parse_position, start)
        # These are read again.
        for position in self._open.keys() - self._looked_up:
            self._forget(position)
        self._told = self._read = start
        return cursor

    def _scan(self, start: Position, wanted: Collection[str]) -> Iterator[Told]:
        last = self._last_offset()
        if start[0] > last:
            return
        cursor = _Cursor(self._open_session(), start)
        try:
            while True:
                entries = cursor.read(PREFETCH, self._clock.now())
                yield from entries
                if not entries and cursor.offset >= last and not cursor.holds_back(wanted, up_to=last):
                    return
                if not cursor.is_open:
                    raise BrokerError("the journal could not be read to its end; try again")
        finally:
            cursor.close()

    def _first_offset_since(self, moment: datetime) -> int:
        """Return an offset before which all records are older than a moment; the broker knows it to the chunk."""
        consumption = _attach(self._open_session(), prefetch=1, offset=moment)
        try:
            pushed = consumption.take(1, wait=FIRST_SECONDS)
            return _offset(pushed[0]) if pushed else self._last_offset() + 1
        finally:
            consumption.close()

    def _last_offset(self, *, at_least: int = -1) -> int:
        """Return an offset in the last chunk of the stream, the wanted one if it is there.

        An empty stream gets a record, to have one.
        """
        session = self._open_session()
        consumption = _attach(session, prefetch=PREFETCH if at_least >= 0 else 1, offset="last")
        try:
            # A journal gets its first record with its creation, so it is not taken to be empty before time.
            pushed = consumption.take(1, wait=SURE_SECONDS)
            if not pushed:
                consumption.channel.tell("basic_publish", exchange=consumption.queue, routing_key="", body=b"")
                pushed = consumption.take(1, wait=session.config.connect_seconds)
            if not pushed and consumption.channel.closed is not None:
                raise translate(consumption.channel.closed, session.config)
            if not pushed:
                raise BrokerError(
                    f"{session.config.name}: the journal {consumption.queue} does not answer; is the stream well?"
                )
            while _offset(pushed[-1]) < at_least and (more := consumption.take(PREFETCH, wait=SURE_SECONDS)):
                consumption.ack(more[-1].tag, multiple=True)
                pushed = more
            return _offset(pushed[-1])
        finally:
            consumption.close()


def _attach(session: Session, *, prefetch: int, offset: int | str | datetime) -> Consumption:
    consumption = Consumption(session, session.config.topology.journal_name)
    consumption.begin(prefetch=prefetch, **{"x-stream-offset": offset})
    return consumption


class _Cursor:
    """One attachment to the stream."""

    def __init__(self, session: Session, after: Position) -> None:
        self.offset = after[0]
        self._after = after
        self._fresh = True
        self._unacked = 0
        offset = max(after[0], 0) if after != BEFORE_ALL else "first"
        self._consumption = _attach(session, prefetch=PREFETCH, offset=offset)
        self._dispatches = Dispatches()

    @property
    def is_open(self) -> bool:
        return self._consumption.is_open

    def read(self, limit: int, now: datetime) -> list[Told]:
        is_first, self._fresh = self._fresh, False
        self._take(limit + LOOK_AHEAD, now, wait=FIRST_SECONDS if is_first else NEXT_SECONDS)
        entries = self._dispatches.release(limit)
        if is_first and self._dispatches and len(entries) < limit:
            # Who begins at the same place again and again would never hear of a dispatch that is held back.
            time.sleep(PARKED_SECONDS)
            self._take(limit + LOOK_AHEAD, now, wait=0)
            entries += self._dispatches.release(limit - len(entries))
        return entries

    def _take(self, most: int, now: datetime, *, wait: float) -> None:
        """Take what the broker pushes, up to ``most`` entries."""
        while len(self._dispatches) < most and (pushed := self._consumption.take(PREFETCH, wait=wait)):
            wait = NEXT_SECONDS
            for item in pushed:
                self.offset = max(self.offset, _offset(item))
                for told in entries_of(item, now):
                    if parse_position(told.entry.position) > self._after:
                        self._dispatches.add(told)
            self._ack(pushed)

    def holds_back(self, message_ids: Collection[str], *, up_to: int) -> bool:
        """Whether a dispatch of one of these messages, recorded up to an offset, is still held back."""
        return any(
            told.entry.message_id in message_ids and parse_position(told.entry.position)[0] <= up_to
            for told in self._dispatches
        )

    def _ack(self, pushed: list[Pushed]) -> None:
        self._unacked += len(pushed)
        if self._unacked >= ACK_EVERY:
            self._consumption.ack(pushed[-1].tag, multiple=True)
            self._unacked = 0

    def close(self) -> None:
        self._consumption.close()


def entries_of(pushed: Pushed, now: datetime) -> list[Told]:
    """Return what one record of the stream stands for.

    Nobody dispatches a message that enters with no delay: its way in is its dispatch. It goes straight to a queue,
    whose refusal its publisher was told.
    """
    if CHANNEL not in (pushed.properties.headers or {}):
        return []
    wired = read_message(pushed.properties, pushed.body, queue="journal", now=now)
    entered_at = wired.scheduled_at or wired.message.deliver_at
    if is_aside(pushed.exchange):
        return [Told(entry=_entry(wired, Change.PARKED, _dispatched_at(wired, pushed, now), pushed))]
    if pushed.exchange.endswith(".entry.now"):
        may_be_held = is_exchange(wired.message.channel)
        changes = _changes_at_once(wired.change)
        return [
            Told(entry=_entry(wired, change, entered_at, pushed, index), may_be_held=may_be_held)
            for index, change in enumerate(changes)
        ]
    if ".entry." in pushed.exchange:
        return [Told(entry=_entry(wired, wired.change or Change.SCHEDULED, entered_at, pushed))]
    dispatched = _entry(wired, Change.DISPATCHED, _dispatched_at(wired, pushed, now), pushed)
    return [Told(entry=dispatched, may_be_held=True)]


def parse_position(text: str) -> Position:
    """Return the place that a position names."""
    if not text:
        return BEFORE_ALL
    offset, _, index = text.partition(".")
    try:
        return int(offset), int(index)
    except ValueError:
        raise InvalidMessageError("position", f"{text!r} is not one of this journal", "use one it has given") from None


def _text(position: Position) -> str:
    return f"{position[0]}.{position[1]}"


def _changes_at_once(change: Change | None) -> tuple[Change, ...]:
    if change is Change.DEAD_LETTERED:
        return (Change.DEAD_LETTERED,)
    return (Change.REQUEUED, Change.DISPATCHED) if change is Change.REQUEUED else (Change.DISPATCHED,)


def _entry(wired: Wired, change: Change, at: datetime, pushed: Pushed, index: int = 0) -> JournalEntry:
    return JournalEntry(
        message_id=wired.message.id,
        change=change,
        at=at,
        channel=wired.message.channel,
        deliver_at=wired.message.deliver_at,
        position=_text((_offset(pushed), index)),
        reason=_reason(wired, change),
        message=wired.message,
    )


def _reason(wired: Wired, change: Change) -> str | None:
    if change is Change.PARKED:
        return (
            f"channel {wired.message.channel!r} was gone, so the message is parked; create the"
            " channel again, then run `airflow delay topology replay-parked`"
        )
    return wired.reason if change is not Change.DISPATCHED else None


def _refused(entry: JournalEntry, now: datetime, *, position: Position) -> JournalEntry:
    return replace(
        entry,
        change=Change.REFUSED,
        at=now,
        position=_text(position),
        reason=f"channel {entry.channel!r} takes no messages: a queue that is full, or an exchange that routes nowhere;"
        " the broker keeps the message in the channel's relay and tries again",
    )


def _dispatched_at(wired: Wired, pushed: Pushed, now: datetime) -> datetime:
    """Return when the last rest ended. The broker tells the second; whoever reads at once knows it better."""
    deaths = (pushed.properties.headers or {}).get("x-death") or [{}]
    second: datetime | None = deaths[0].get("time")
    due = wired.message.deliver_at
    if second is None:
        return max(due, now)
    second = second.replace(tzinfo=now.tzinfo) if second.tzinfo is None else second
    return max(due, now if now < second + ONE_SECOND else second)


def _offset(pushed: Pushed) -> int:
    offset: int = (pushed.properties.headers or {}).get("x-stream-offset", -1)
    return offset
