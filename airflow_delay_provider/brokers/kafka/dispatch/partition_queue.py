"""One topic-partition that a dispatcher reads: its fetched records, and which of them are done. No I/O."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from confluent_kafka import Message

from airflow_delay_provider.brokers.kafka import header_protocol, wire
from airflow_delay_provider.brokers.kafka.header_protocol import HEADER_BYTES
from airflow_delay_provider.brokers.kafka.progress import Progress
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.brokers.kafka.topology import COVER_MS

#: A message leaves its last rung this long before it is due. So messages are delivered in order of their due times,
#: whichever rungs they come from.
SLACK_MS = 500
#: In place of headers whose names are not text.
UNREADABLE = "unreadable-headers"


class Record(NamedTuple):
    """The parts of a Kafka record that a dispatcher needs."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: header_protocol.Headers | None = None

    @classmethod
    def of(cls, record: Message, *, with_headers: bool) -> Record:
        """Return the parts of a fetched record."""
        headers: header_protocol.Headers | None = None
        if with_headers:
            try:
                headers = record.headers() or None
            except UnicodeDecodeError:
                headers = [(UNREADABLE, b"")]
        return cls(record.offset(), record.timestamp()[1], record.key(), record.value(), headers)

    @property
    def size(self) -> int:
        """Its bytes."""
        headers = self.headers or ()
        size = sum(len(name) + len(value or b"") + HEADER_BYTES for name, value in headers)
        return size + len(self.key or b"") + len(self.value or b"")


class PartitionQueue:
    """The fetched records of one topic-partition that are not processed yet, and which records are done."""

    def __init__(self, topic: str, hold_ms: int, progress: Progress, *, topic_id: str = "") -> None:
        self.topic = topic
        #: Changes if the topic is deleted and created again.
        self.topic_id = topic_id
        #: How long records wait here; 0 is not at all.
        self.hold_ms = hold_ms
        self.progress = progress
        self.waiting: deque[Record] = deque()
        #: Bytes of their values.
        self.waiting_bytes = 0
        #: Offsets of records to skip.
        self.recalled: set[int] = set()
        #: Offsets of records that could not be processed, why, and whether their content may be kept.
        self.given_up: dict[int, tuple[str, bool]] = {}
        #: Whether there is progress to commit.
        self.is_changed = False
        #: For a roll-back to the last commit: records that were begun and not done by then, or begun since; records
        #: that ended since; and whether changed offsets were recalled before.
        self._begun: dict[int, Record] = {}
        self._ended: list[int] = []
        self._recalled_before: dict[int, bool] = {}
        self._committed = (progress.low, progress.note())
        #: When records must leave at the latest, and their offsets: only those that no more urgent record follows.
        self._latest: deque[tuple[int, int]] = deque()

    def position(self, partition: int, offset: int) -> RecordPosition:
        """Return the position of one of its records."""
        return RecordPosition(topic=self.topic, partition=partition, offset=offset)

    def add(self, record: Record) -> None:
        """Add a fetched record."""
        self.waiting.append(record)
        self.waiting_bytes += len(record.value or b"")
        if self.hold_ms and record.key is not None:
            latest = (_latest_ms(record.key), record.offset)
            while self._latest and self._latest[-1] > latest:
                self._latest.pop()
            self._latest.append(latest)

    def begin(self, offset: int) -> bool:
        """Take the next record and return whether it has to be processed."""
        record = self.waiting.popleft()
        self.waiting_bytes -= len(record.value or b"")
        if self._latest and self._latest[0][1] == record.offset:
            self._latest.popleft()
        self.is_changed = True
        if not self.progress.begin(offset):
            return False
        self._begun[offset] = record
        return True

    def end(self, offset: int) -> None:
        """Mark a record as done."""
        self.progress.end(offset)
        self._ended.append(offset)
        self.is_changed = True

    def recall(self, offset: int, *, recalled: bool) -> None:
        """Mark a record as one to skip, or remove that mark."""
        self._recalled_before.setdefault(offset, offset in self.recalled)
        if recalled:
            self.recalled.add(offset)
        else:
            self.recalled.discard(offset)

    def committed(self) -> None:
        """Learn that everything up to now is committed."""
        if self.is_changed:
            self._committed = (self.progress.low, self.progress.note())
        for offset in self._ended:
            self._begun.pop(offset, None)
        self._ended.clear()
        self._recalled_before.clear()
        self.is_changed = False

    def roll_back(self) -> None:
        """Return to the state of the last commit, and keep the records fetched since."""
        again = [*(self._begun[offset] for offset in sorted(self._begun)), *self.waiting]
        self.waiting.clear()
        self.waiting_bytes = 0
        self._latest.clear()
        for record in again:
            self.add(record)
        self.progress = Progress(*self._committed)
        for offset, was_recalled in self._recalled_before.items():
            (self.recalled.add if was_recalled else self.recalled.discard)(offset)
        self._begun.clear()
        self._ended.clear()
        self._recalled_before.clear()
        self.is_changed = False

    def is_waiting(self, offset: int) -> bool:
        """Whether the message of a record is still to be delivered."""
        return self.progress.is_waiting(offset) and offset not in self.recalled

    def has_room(self) -> bool:
        """Whether the next record may be begun before another one ends."""
        return bool(self.waiting) and self.progress.has_room_for(self.waiting[0].offset)

    def is_crowded(self) -> bool:
        """Whether records must end soon, or no further record could be begun."""
        return self.progress.is_crowded()

    def hold_ends_ms(self, record: Record) -> int:
        """Return when the hold time of a record ends, by the broker's clock."""
        return record.timestamp_ms + self.hold_ms

    def ready_ms(self, record: Record) -> int:
        """Return when a record is to be processed: after its hold time, if the broker's clock agrees with ours.

        If the broker's clock is ahead, the record is processed before its message would be late. If it is behind, the
        record is processed when its next hold time is a shorter one: a record is only put here with less than two such
        hold times left, or it would be in a longer rung. That is not true of the longest rungs, in which messages wait
        several times.
        """
        if not self.hold_ms or record.key is None or record.offset in self.given_up:
            return 0
        hold_ends_ms, latest_ms = self.hold_ends_ms(record), _latest_ms(record.key)
        if self.hold_ms <= COVER_MS // 2:
            hold_ends_ms = max(hold_ends_ms, latest_ms - self.hold_ms + 1)
        return min(hold_ends_ms, latest_ms)

    def next_ready_ms(self) -> int:
        """Return when the first record is to be processed.

        If a record behind it would be late otherwise, that is when its hold time ends by the broker's clock. This
        package never puts a record here that has to leave before those ahead of it, so another program wrote the first
        one.
        """
        first = self.waiting[0]
        ready_ms, hold_ends_ms = self.ready_ms(first), self.hold_ends_ms(first)
        return ready_ms if ready_ms <= hold_ends_ms else max(hold_ends_ms, min(ready_ms, self._latest[0][0]))

    def is_misplaced(self, record: Record, now_ms: int) -> bool:
        """Whether a record would block those behind it, because it was put here with two such hold times left or more.

        This package would have put it into a longer rung. In the longest rungs, hold times end by the broker's clock
        alone and block no record.
        """
        if not self.hold_ms or self.hold_ms > COVER_MS // 2 or record.key is None:
            return False
        return _latest_ms(record.key) - now_ms >= 2 * self.hold_ms


def _latest_ms(key: bytes) -> int:
    """Return when a record with this key must leave its rung at the latest."""
    return wire.held_until_ms(key) - SLACK_MS
