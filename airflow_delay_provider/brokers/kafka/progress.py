"""Which records of one partition are done, although they end in any order. No I/O.

Kafka stores one committed offset for each partition, and up to 4095 characters of metadata, the *note*. The offset is
that of the first record that is not done, and the note contains all others that were begun and are not done. A consumer
that continues from there processes exactly the records that are not done.
"""

from __future__ import annotations

from base64 import b85decode, b85encode
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

#: With fewer open records, or a shorter distance from the first to the last one, the note always fits.
FEW_OPEN = 700
SHORT_SPAN = 24_000
_BITMAP, _STEPS = "b", "s"
#: Separates a note from the id of its topic.
_ID = " "


class Committed(Protocol):
    """The committed offset of a partition."""

    topic: str
    partition: int
    offset: int
    metadata: str | None


class Progress:
    """The records of one partition, begun in order and ended in any order."""

    __slots__ = ("_begun", "next", "open")

    def __init__(self, offset: int, note: str = "") -> None:
        #: Begun and not done, in order.
        self.open: dict[int, None] = dict.fromkeys(_read(offset, note))
        #: No record from here on was begun.
        self.next = _end(offset, note)
        #: The open ones, and some behind the first that are done, in order.
        self._begun = deque(self.open)

    @property
    def low(self) -> int:
        """The first record that is not done."""
        begun = self._begun
        while begun and begun[0] not in self.open:
            begun.popleft()
        return begun[0] if begun else self.next

    def has_room_for(self, offset: int) -> bool:
        """Whether a record may be begun before another one ends; one that was begun before a crash always may."""
        return offset < self.next or len(self.open) < FEW_OPEN or offset - self.low < SHORT_SPAN

    def is_crowded(self) -> bool:
        """Whether half of the note is used: records that can end without harm should."""
        return 2 * len(self.open) > FEW_OPEN and 2 * (self.next - self.low) > SHORT_SPAN

    def begin(self, offset: int) -> bool:
        """Begin a record and return whether it has to be processed."""
        if offset < self.next:
            return offset in self.open
        self.open[offset] = None
        self._begun.append(offset)
        self.next = offset + 1
        return True

    def end(self, offset: int) -> None:
        """Mark a record as done."""
        del self.open[offset]

    def is_waiting(self, offset: int) -> bool:
        """Whether the record is not done, begun or not."""
        return offset >= self.next or offset in self.open

    def note(self) -> str:
        """Return what must be committed besides ``low``; empty if every record begun is done."""
        if not self.open:
            return ""
        low = self.low
        span = self.next - low
        # Usually the shorter one, and never a bitmap of a wide gap.
        write = _bitmap if 8 * len(self.open) > span else _steps
        return f"{span}:{write(self.open, low)}"


def progress_of(
    committed: Committed,
    starts: Mapping[tuple[str, int], int],
    *,
    ends: Mapping[tuple[str, int], int] | None = None,
    topic_id: str = "",
) -> Progress:
    """Return the progress that a group has committed; without one, it starts with the first record.

    So it does if the topic was deleted and created again since.
    """
    where = (committed.topic, committed.partition)
    if committed.offset < 0:
        return Progress(starts[where])
    note, noted_id, _ = _read_note(committed)
    end = committed.offset if ends is None else ends[where]
    if (noted_id and topic_id and noted_id != topic_id) or (committed.offset > end and noted_id != topic_id):
        return Progress(starts[where])
    # A log that has lost records ends before the progress.
    return Progress(committed.offset, note) if committed.offset <= end else Progress(end)


def note_of(progress: Progress, topic_id: str, *, service: str = "") -> str:
    """Return what is committed with the offset: the note, the id of its topic, and the service that has the messages.

    :param service: a service that keeps waiting messages outside of Kafka, such as a job on Spark.
    """
    parts = [progress.note(), topic_id, service]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return _ID.join(parts)


def service_of(committed: Committed) -> str:
    """Return the service that keeps the messages of a partition; empty if there is none."""
    return _read_note(committed)[2]


def _read_note(committed: Committed) -> tuple[str, str, str]:
    """Return the three parts that ``note_of`` joins; any may be empty."""
    note, _, rest = (committed.metadata or "").partition(_ID)
    topic_id, _, service = rest.partition(_ID)
    return note, topic_id, service


def _bitmap(offsets: Iterable[int], low: int) -> str:
    bits = bytearray()
    for offset in offsets:
        byte, bit = divmod(offset - low, 8)
        if byte >= len(bits):
            bits.extend(bytes(byte + 1 - len(bits)))
        bits[byte] |= 1 << bit
    return _BITMAP + b85encode(bits).decode()


def _steps(offsets: Iterable[int], low: int) -> str:
    """Return the distances from one offset to the next, seven bits a byte, the last byte of each marked."""
    steps, before = bytearray(), low
    for offset in offsets:
        step, before = offset - before, offset
        while step > 127:
            steps.append(step & 127)
            step >>= 7
        steps.append(step | 128)
    return _STEPS + b85encode(steps).decode()


def _end(offset: int, note: str) -> int:
    return offset + int(note.partition(":")[0]) if note else offset


def _read(low: int, note: str) -> Iterator[int]:
    kind, data = note.partition(":")[2][:1], b85decode(note.partition(":")[2][1:])
    if kind == _BITMAP:
        yield from (low + 8 * byte + bit for byte, bits in enumerate(data) for bit in range(8) if bits >> bit & 1)
    elif kind == _STEPS:
        offset, step, shift = low, 0, 0
        for byte in data:
            step |= (byte & 127) << shift
            shift += 7
            if byte & 128:
                offset += step
                yield offset
                step = shift = 0
