"""The journal: a stream that the broker itself fills at the entries and behind the last level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.rabbitmq.consuming import Consumption, Pushed
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.brokers.rabbitmq.topology import JOURNAL
from airflow_delay_provider.brokers.rabbitmq.wire import CHANNEL, Wired, read_message
from airflow_delay_provider.brokers.recent_outcomes import RecentOutcomes
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import FINAL_CHANGES, Change
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
    """Reads on from a position for as long as it is asked for what comes next, without attaching anew each time."""

    def __init__(self, open_session: Callable[[], Session], clock: Clock) -> None:
        self._open_session = open_session
        self._clock = clock
        self._cursor: _Cursor | None = None
        #: The position that the caller was given last.
        self._told: Position = BEFORE_ALL
        self._memory = RecentOutcomes(parse_position)

    def end(self) -> str:
        """Return the position of the last record there is, or of one before it."""
        return _text((self._last_offset() - 1, 0))

    def read(self, after: str, limit: int) -> list[JournalEntry]:
        """Return the next entries; the broker is given a moment to push them."""
        start = parse_position(after)
        cursor = self._cursor
        if cursor is None or not cursor.is_open or start != self._told:
            cursor = self._attach(start)
        entries = cursor.read(limit, self._clock.now())
        if entries:
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
        for entry in self._scan(start) if len(found) < len(set(message_ids)) else ():
            if entry.change in FINAL_CHANGES and entry.message_id in message_ids:
                found.setdefault(entry.message_id, entry)
        return found

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
        self._told = start
        return cursor

    def _scan(self, start: Position) -> Iterator[JournalEntry]:
        last = self._last_offset()
        if start[0] > last:
            return
        cursor = _Cursor(self._open_session(), start)
        try:
            while True:
                entries = cursor.read(PREFETCH, self._clock.now())
                yield from entries
                if not entries and cursor.offset >= last:
                    return
                if not cursor.is_open:
                    raise BrokerError("the journal could not be read to its end; try again")
        finally:
            cursor.close()

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
                consumption.channel.tell("basic_publish", exchange=JOURNAL, routing_key="", body=b"")
                pushed = consumption.take(1, wait=session.config.connect_seconds)
            if not pushed and consumption.channel.closed is not None:
                raise translate(consumption.channel.closed, session.config)
            if not pushed:
                raise BrokerError(f"{session.config.name}: the journal {JOURNAL} does not answer; is the stream well?")
            while _offset(pushed[-1]) < at_least and (more := consumption.take(PREFETCH, wait=SURE_SECONDS)):
                consumption.ack(more[-1].tag, multiple=True)
                pushed = more
            return _offset(pushed[-1])
        finally:
            consumption.close()


def _attach(session: Session, *, prefetch: int, offset: int | str) -> Consumption:
    consumption = Consumption(session, JOURNAL)
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
        self._waiting: list[JournalEntry] = []

    @property
    def is_open(self) -> bool:
        return self._consumption.is_open

    def read(self, limit: int, now: datetime) -> list[JournalEntry]:
        wait, self._fresh = (FIRST_SECONDS if self._fresh else NEXT_SECONDS), False
        while len(self._waiting) < limit and (pushed := self._consumption.take(PREFETCH, wait=wait)):
            wait = NEXT_SECONDS
            for item in pushed:
                self.offset = max(self.offset, _offset(item))
                self._waiting += [e for e in entries_of(item, now) if parse_position(e.position) > self._after]
            self._ack(pushed)
        entries, self._waiting = self._waiting[:limit], self._waiting[limit:]
        return entries

    def _ack(self, pushed: list[Pushed]) -> None:
        self._unacked += len(pushed)
        if self._unacked >= ACK_EVERY:
            self._consumption.ack(pushed[-1].tag, multiple=True)
            self._unacked = 0

    def close(self) -> None:
        self._consumption.close()


def entries_of(pushed: Pushed, now: datetime) -> list[JournalEntry]:
    """Return what one record of the stream stands for.

    Nobody dispatches a message that enters with no delay: its way in is its dispatch.
    """
    if CHANNEL not in (pushed.properties.headers or {}):
        return []
    wired = read_message(pushed.properties, pushed.body, queue=JOURNAL, now=now)
    entered_at = wired.scheduled_at or wired.message.deliver_at
    if pushed.exchange.endswith(".entry.now"):
        changes = _changes_at_once(wired.change)
        return [_entry(wired, change, entered_at, pushed, index) for index, change in enumerate(changes)]
    if ".entry." in pushed.exchange:
        return [_entry(wired, wired.change or Change.SCHEDULED, entered_at, pushed)]
    return [_entry(wired, Change.DISPATCHED, _dispatched_at(wired, pushed, now), pushed)]


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
        reason=wired.reason if change is not Change.DISPATCHED else None,
        message=wired.message,
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
