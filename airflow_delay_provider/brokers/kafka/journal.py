"""The journal of a ladder: a topic that dispatchers write in the transaction that makes each change.

One record holds all entries of one partition and one transaction.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class

from confluent_kafka import Message, TopicPartition

from airflow_delay_provider.brokers.broker_held import REVERSIBLE, RecentOutcomes, keep_outcome
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.header_protocol import clean_reason
from airflow_delay_provider.brokers.kafka.reader import PartitionId, Reader, log_starts, stable_ends
from airflow_delay_provider.brokers.kafka.wire import Envelope, encode_key
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import (
    FROM_THE_START,
    JOURNAL_PAGE_BYTES,
    Change,
    JournalEntry,
    size_of_entry,
)

log = logging.getLogger(__name__)

#: How long a reader that has caught up waits for new entries.
NEXT_SECONDS = 0.03
FIRST_SECONDS = 5.0
#: Change, time, due time after it, then the lengths of id, channel, reason and envelope.
_ENTRY = Struct(">BqqHHHI")
_CODES = {
    Change.SCHEDULED: 1,
    Change.DISPATCHED: 2,
    Change.CANCELLED: 3,
    Change.RESCHEDULED: 4,
    Change.EXPEDITED: 5,
    Change.REQUEUED: 6,
    Change.DEAD_LETTERED: 7,
    Change.REFUSED: 8,
    Change.PARKED: 9,
}
_CHANGES = {code: change for change, code in _CODES.items()}
#: The result of a command: its id, and in place of a reason whether it was accepted.
_ANSWER = 100


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The answer of a dispatcher to a command."""

    command_id: str
    accepted: bool


@dataclass(frozen=True, slots=True)
class EncodedEntry:
    """One entry of the journal; its message is decoded only when needed."""

    code: int
    at_ms: int
    deliver_at_ms: int
    message_id: bytes
    channel: bytes
    reason: bytes
    envelope: bytes

    @property
    def result(self) -> CommandResult | None:
        """The result of a command, if it is one."""
        return CommandResult(self.message_id.decode(), bool(self.reason)) if self.code == _ANSWER else None

    @property
    def change(self) -> Change | None:
        """The change; None for results of commands."""
        return _CHANGES.get(self.code)

    def entry(self, position: str) -> JournalEntry:
        """Return the decoded entry."""
        decoded = Envelope(encode_key(0, "") + self.message_id, self.envelope).decode() if self.envelope else None
        return JournalEntry(
            message_id=self.message_id.decode(),
            change=_CHANGES[self.code],
            at=from_ms(self.at_ms),
            channel=self.channel.decode(),
            deliver_at=from_ms(self.deliver_at_ms),
            position=position,
            reason=self.reason.decode() or None,
            message=None if decoded is None else decoded.message,
        )


def encode_entry(
    change: Change,
    *,
    at_ms: int,
    deliver_at_ms: int,
    message_id: bytes,
    channel: str,
    reason: str | None = None,
    envelope: bytes = b"",
) -> bytes:
    """Return one entry."""
    where, why = channel.encode(), b"" if reason is None else clean_reason(reason).encode()
    head = _ENTRY.pack(_CODES[change], at_ms, deliver_at_ms, len(message_id), len(where), len(why), len(envelope))
    return b"".join((head, message_id, where, why, envelope))


def encode_scheduled(envelope: Envelope, value: bytes) -> bytes:
    """Return the entry of a message that begins to wait."""
    return encode_entry(
        envelope.change or Change.SCHEDULED,
        at_ms=envelope.scheduled_at_ms,
        deliver_at_ms=envelope.deliver_at_ms,
        message_id=envelope.message_id,
        channel=envelope.channel,
        reason=envelope.more.get("reason"),
        envelope=value,
    )


def encode_left(envelope: Envelope, now_ms: int, *, refusal: str | None = None) -> bytes:
    """Return the entry of a message that has left the ladder: dispatched, or refused and dead-lettered."""
    return encode_entry(
        Change.DISPATCHED if refusal is None else Change.DEAD_LETTERED,
        at_ms=now_ms,
        deliver_at_ms=envelope.deliver_at_ms,
        message_id=envelope.message_id,
        channel=envelope.channel,
        reason=refusal,
    )


def encode_result(command_id: str, *, at_ms: int, accepted: bool) -> bytes:
    """Return the entry of a command's result."""
    who, what = command_id.encode(), b"obeyed" if accepted else b""
    return _ENTRY.pack(_ANSWER, at_ms, 0, len(who), 0, len(what), 0) + who + what


def is_result(entry: bytes) -> bool:
    """Whether this entry is the result of a command, for which a client waits."""
    return entry[0] == _ANSWER


def decode_entries(value: bytes) -> Iterator[EncodedEntry]:
    """Return the entries of one record."""
    start = 0
    while start < len(value):
        code, at_ms, deliver_at_ms, *lengths = _ENTRY.unpack_from(value, start)
        start += _ENTRY.size
        parts = []
        for length in lengths:
            parts.append(value[start : start + length])
            start += length
        yield EncodedEntry(code, at_ms, deliver_at_ms, *parts)


@dataclass(frozen=True, slots=True)
class Position:
    """The next entry of each partition: a record, and the index in it."""

    partitions: tuple[tuple[int, int], ...]

    def __ge__(self, other: Position) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self.partitions, other.partitions, strict=False))

    def __str__(self) -> str:
        return "-".join(f"{offset}.{index}" for offset, index in self.partitions)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Undo ``str``."""
        try:
            parts = [partition.split(".") for partition in text.split("-")]
            return cls(tuple((int(offset), int(index)) for offset, index in parts))
        except ValueError:
            raise InvalidMessageError(
                "position", f"{text!r} is not a position of this journal", "use one that it returned"
            ) from None


class JournalReader:
    """Reads the journal; a caller that continues where it stopped costs no new start."""

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._topic = clients.config.topology.journal
        #: One follows the end, the other one searches.
        self._tail = Reader(clients, patience_ms=100)
        self._scanner = Reader(clients)
        self._waiting: deque[tuple[EncodedEntry, Position]] = deque()
        self._waiting_bytes = 0
        #: Up to where records were read, and the last position that was returned.
        self._read: list[tuple[int, int]] = []
        self._returned: str | None = None
        self._memory = RecentOutcomes(Position.parse)

    def end(self) -> str:
        """Return the position behind the last visible entry."""
        return str(Position(tuple((end, 0) for _, end in self._bounds())))

    def read(self, after: str, limit: int) -> list[JournalEntry]:
        """Return the next entries; a caller that continues waits a moment for new ones."""
        if after != self._returned:
            self._attach(after)
        else:
            self._fetch(limit, NEXT_SECONDS)
        entries, room = list[JournalEntry](), JOURNAL_PAGE_BYTES
        while self._waiting and len(entries) < limit and room > 0:
            encoded, position = self._waiting.popleft()
            self._waiting_bytes -= len(encoded.envelope)
            if encoded.change is not None and (entry := _entry(encoded, position)) is not None:
                entries.append(entry)
                room -= size_of_entry(entry)
        if entries:
            self._returned = entries[-1].position
            self._memory.add(entries)
        return entries

    def find(self, since: Mapping[str, str]) -> dict[str, JournalEntry]:
        """Return the first final entry of each id behind its position, in one look back."""
        bounds, found = self._bounds(), dict[str, JournalEntry]()
        parsed = {text: _start_of(text, bounds) for text in set(since.values())}
        starts = {each: parsed[text] for each, text in since.items()}
        if self._returned is not None:
            known = [each for each, start in starts.items() if self._memory.covers(start)]
            found = self._memory.get(known)
            starts |= dict.fromkeys(known, _start_of(self._returned, bounds))
        # In bytes, like the ids in the journal.
        wanted = {
            each.encode(): start.partitions
            for each, start in starts.items()
            if each not in found or found[each].change in REVERSIBLE
        }
        if not wanted:
            return found
        first = Position(tuple(min(each) for each in zip(*wanted.values(), strict=True)))
        for encoded, partition, position in self._scan(first, bounds):
            start = wanted.get(encoded.message_id)
            if start is None or encoded.change is None or position.partitions[partition] <= start[partition]:
                continue
            if (entry := _entry(encoded, position)) is not None:
                keep_outcome(found, entry)
        return found

    def command_results(self, since: str, commands: Collection[str], *, seconds: float) -> dict[str, bool]:
        """Wait for the results of these commands; return those that came in time."""
        missing, results = set(commands), dict[str, bool]()
        self._scanner.start(self._offsets(self._start(since)))
        deadline = time.monotonic() + seconds
        try:
            while missing and time.monotonic() < deadline:
                for _, record in self._scanner.take(0.05):
                    for encoded in decode_entries(b"" if isinstance(record, int) else record.value()):
                        if (result := encoded.result) is not None and result.command_id in missing:
                            missing.discard(result.command_id)
                            results[result.command_id] = result.accepted
        finally:
            self._scanner.stop()
        return results

    def recently(self, entries: int) -> str:
        """Return a position so many records before the end of each partition."""
        return str(Position(tuple((max(start, end - entries), 0) for start, end in self._bounds())))

    # -- pieces --------------------------------------------------------------------------------------------------

    def _attach(self, after: str) -> None:
        """Start reading at a position, up to the current end."""
        start = self._start(after)
        ends = [end for _, end in self._bounds()]
        self._read, self._returned = list(start.partitions), after
        self._waiting.clear()
        self._waiting_bytes = 0
        self._memory = RecentOutcomes(Position.parse, start)
        self._tail.start(self._offsets(start))
        deadline = time.monotonic() + FIRST_SECONDS
        while any(read[0] < end for read, end in zip(self._read, ends, strict=True)) and time.monotonic() < deadline:
            if not self._fetch(1, 0.1) and self._waiting:
                return

    def _fetch(self, limit: int, wait: float) -> int:
        """Fetch until there are entries for a page or no more, and return how many records came."""
        count = 0
        while self._lacks(limit) and (records := list(self._tail.take(wait))):
            wait = 0.0
            for (_, partition), record in records:
                count += self._keep(partition, record)
        return count

    def _lacks(self, limit: int) -> bool:
        return len(self._waiting) < limit and self._waiting_bytes < JOURNAL_PAGE_BYTES

    def _keep(self, partition: int, record: Message | int) -> int:
        if isinstance(record, int):
            # Between the last record and the end are only transaction markers.
            self._read[partition] = max(self._read[partition], (record, 0))
            return 0
        for encoded, at in _entries_of(record):
            if at > self._read[partition]:
                self._read[partition] = at
                self._waiting.append((encoded, Position(tuple(self._read))))
                self._waiting_bytes += len(encoded.envelope)
        return 1

    def _scan(self, start: Position, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[EncodedEntry, int, Position]]:
        partitions = list(start.partitions)
        starts: Mapping[PartitionId, int] = {(self._topic, partition): at[0] for partition, at in enumerate(partitions)}
        ends = {(self._topic, partition): end for partition, (_, end) in enumerate(bounds)}
        for record in self._scanner.read_between(starts, ends):
            partition = record.partition()
            for encoded, at in _entries_of(record):
                if at > partitions[partition]:
                    partitions[partition] = at
                    yield encoded, partition, Position(tuple(partitions))

    def _start(self, text: str) -> Position:
        return _start_of(text, self._bounds())

    def _offsets(self, start: Position) -> dict[PartitionId, int]:
        return {(self._topic, partition): offset for partition, (offset, _) in enumerate(start.partitions)}

    def _bounds(self) -> list[tuple[int, int]]:
        """The first offset of each partition, and the one behind its last visible record."""
        numbers = range(self._clients.config.topology.partitions)
        partitions = [TopicPartition(self._topic, number) for number in numbers]
        starts, ends = log_starts(self._clients, partitions), stable_ends(self._clients, partitions)
        return [(starts[self._topic, number], ends[self._topic, number]) for number in numbers]


def _start_of(text: str, bounds: Sequence[tuple[int, int]]) -> Position:
    """Return where to start; a position behind the end belongs to a journal that was deleted since."""
    partitions = Position.parse(text).partitions if text != FROM_THE_START else ()
    known = [*partitions[: len(bounds)], *[(0, 0)] * (len(bounds) - len(partitions))]
    return Position(
        tuple(
            max(at, (start, 0)) if at[0] <= end else (start, 0) for at, (start, end) in zip(known, bounds, strict=True)
        )
    )


def _entry(encoded: EncodedEntry, position: Position) -> JournalEntry | None:
    """Return the decoded entry; None if its message cannot be read."""
    try:
        return encoded.entry(str(position))
    except (ValueError, OverflowError, StructError) as error:
        log.warning("A journal entry contains a message that cannot be read: %s", error)
        return None


def _entries_of(record: Message) -> Iterator[tuple[EncodedEntry, tuple[int, int]]]:
    """Return each entry of a record, and where to continue behind it."""
    entries = list(decode_entries(record.value() or b""))
    for index, encoded in enumerate(entries, start=1):
        yield encoded, (record.offset(), index) if index < len(entries) else (record.offset() + 1, 0)
