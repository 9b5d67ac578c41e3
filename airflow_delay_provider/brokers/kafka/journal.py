"""The journal: a topic that dispatchers write in the transactions in which things happen."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import error as StructError  # noqa: N812 - a class
from typing import TYPE_CHECKING

from confluent_kafka import Message, TopicPartition

from airflow_delay_provider.brokers.kafka import administering
from airflow_delay_provider.brokers.kafka.journal_wire import Noted, read_entries
from airflow_delay_provider.brokers.kafka.reading import Partition, Reader
from airflow_delay_provider.brokers.recent_outcomes import RecentOutcomes, note_outcome
from airflow_delay_provider.domain.journal import FROM_THE_START, JournalEntry
from airflow_delay_provider.exceptions import InvalidMessageError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.link import Link

log = logging.getLogger(__name__)

#: How long a reader that has caught up waits for more.
NEXT_SECONDS = 0.03
FIRST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Position:
    """What to read next of each lane: a record, and which entry in it."""

    lanes: tuple[tuple[int, int], ...]

    def __ge__(self, other: Position) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self.lanes, other.lanes, strict=False))

    def __str__(self) -> str:
        return "-".join(f"{offset}.{index}" for offset, index in self.lanes)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Undo ``str``."""
        try:
            parts = [lane.split(".") for lane in text.split("-")]
            return cls(tuple((int(offset), int(index)) for offset, index in parts))
        except ValueError:
            raise InvalidMessageError(
                "position", f"{text!r} is not one of this journal", "use one it has given"
            ) from None


class JournalReader:
    """Reads on from a position for as long as it is asked for what comes next, without beginning anew each time."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._topic = link.config.topology.journal
        #: One reads on, the other one back.
        self._tail = Reader(link, patience_ms=100)
        self._scanner = Reader(link)
        self._waiting: deque[tuple[Noted, Position]] = deque()
        #: Up to where records were read, and the position that the caller was given last.
        self._read: list[tuple[int, int]] = []
        self._told: str | None = None
        self._memory = RecentOutcomes(Position.parse)

    def end(self) -> str:
        """Return the position behind everything that readers can see."""
        return str(Position(tuple((end, 0) for _, end in self._bounds())))

    def read(self, after: str, limit: int) -> list[JournalEntry]:
        """Return the next entries; a journal that is read on is given a moment for more."""
        if after != self._told:
            self._attach(after)
        else:
            self._fetch(limit, NEXT_SECONDS)
        entries: list[JournalEntry] = []
        while self._waiting and len(entries) < limit:
            noted, position = self._waiting.popleft()
            if noted.change is not None and (entry := _entry(noted, position)) is not None:
                entries.append(entry)
        if entries:
            self._told = entries[-1].position
            self._memory.add(entries)
        return entries

    def find(self, message_ids: Sequence[str], since: str) -> dict[str, JournalEntry]:
        """Return the first final entry of each of these ids that is recorded behind ``since`` by now."""
        start, found = self._start(since), dict[str, JournalEntry]()
        if self._told is not None and self._memory.covers(start):
            found, start = self._memory.get(message_ids), self._start(self._told)
        wanted = {each.encode() for each in message_ids}
        for noted, position in self._scan(start) if len(found) < len(wanted) else ():
            is_wanted = noted.message_id in wanted and noted.change is not None
            if is_wanted and (entry := _entry(noted, position)) is not None:
                note_outcome(found, entry)
        return found

    def answers(self, since: str, commands: Collection[str], *, seconds: float) -> dict[str, bool]:
        """Wait for the dispatchers' answers to these commands; return those that came in time."""
        missing, answered = set(commands), dict[str, bool]()
        self._scanner.start(self._places(self._start(since)))
        deadline = time.monotonic() + seconds
        try:
            while missing and time.monotonic() < deadline:
                for _, record in self._scanner.take(0.05):
                    for noted in read_entries(b"" if isinstance(record, int) else record.value()):
                        if (answer := noted.answer) is not None and answer.command_id in missing:
                            missing.discard(answer.command_id)
                            answered[answer.command_id] = answer.obeyed
        finally:
            self._scanner.stop()
        return answered

    def recently(self, entries: int) -> str:
        """Return a position so many records before the end of each lane."""
        return str(Position(tuple((max(start, end - entries), 0) for start, end in self._bounds())))

    # -- pieces --------------------------------------------------------------------------------------------------

    def _attach(self, after: str) -> None:
        """Begin to read at a position, up to what is there now."""
        start = self._start(after)
        ends = [end for _, end in self._bounds()]
        self._read, self._told = list(start.lanes), after
        self._waiting.clear()
        self._memory = RecentOutcomes(Position.parse, start)
        self._tail.start(self._places(start))
        deadline = time.monotonic() + FIRST_SECONDS
        while any(read[0] < end for read, end in zip(self._read, ends, strict=True)) and time.monotonic() < deadline:
            if not self._fetch(1, 0.1) and self._waiting:
                return

    def _fetch(self, limit: int, wait: float) -> int:
        """Read until there are so many entries or nothing more comes, and return how many records came."""
        count = 0
        while len(self._waiting) < limit and (records := list(self._tail.take(wait))):
            wait = 0.0
            for (_, lane), record in records:
                count += self._keep(lane, record)
        return count

    def _keep(self, lane: int, record: Message | int) -> int:
        if isinstance(record, int):
            # What lies between the last record and the end are marks of transactions.
            self._read[lane] = max(self._read[lane], (record, 0))
            return 0
        for noted, at in _entries_of(record):
            if at > self._read[lane]:
                self._read[lane] = at
                self._waiting.append((noted, Position(tuple(self._read))))
        return 1

    def _scan(self, start: Position) -> Iterator[tuple[Noted, Position]]:
        lanes = list(start.lanes)
        starts: Mapping[Partition, int] = {(self._topic, lane): at[0] for lane, at in enumerate(lanes)}
        ends = {(self._topic, lane): end for lane, (_, end) in enumerate(self._bounds())}
        for record in self._scanner.read_between(starts, ends):
            for noted, at in _entries_of(record):
                if at > lanes[record.partition()]:
                    lanes[record.partition()] = at
                    yield noted, Position(tuple(lanes))

    def _start(self, text: str) -> Position:
        """Return the place that a position names; one behind the end is of a journal that was deleted since."""
        bounds = self._bounds()
        lanes = Position.parse(text).lanes if text != FROM_THE_START else ()
        known = [*lanes[: len(bounds)], *[(0, 0)] * (len(bounds) - len(lanes))]
        return Position(
            tuple(
                max(at, (start, 0)) if at[0] <= end else (start, 0)
                for at, (start, end) in zip(known, bounds, strict=True)
            )
        )

    def _places(self, start: Position) -> dict[Partition, int]:
        return {(self._topic, lane): offset for lane, (offset, _) in enumerate(start.lanes)}

    def _bounds(self) -> list[tuple[int, int]]:
        """The first record of each lane, and the one behind the last that readers can see."""
        lanes = range(self._link.config.topology.partitions)
        places = [TopicPartition(self._topic, lane) for lane in lanes]
        starts = administering.log_starts(self._link, places)
        ends = administering.stable_ends(self._link, places)
        return [(starts[self._topic, lane], ends[self._topic, lane]) for lane in lanes]


def _entry(noted: Noted, position: Position) -> JournalEntry | None:
    """Return an entry for a reader; None where somebody has scheduled what no message can be."""
    try:
        return noted.entry(str(position))
    except (ValueError, OverflowError, StructError) as error:
        log.warning("The journal tells of a message that cannot be read: %s", error)
        return None


def _entries_of(record: Message) -> Iterator[tuple[Noted, tuple[int, int]]]:
    """Return each entry of a record with the place to read on behind it."""
    entries = list(read_entries(record.value() or b""))
    for index, noted in enumerate(entries, start=1):
        yield noted, (record.offset(), index) if index < len(entries) else (record.offset() + 1, 0)
