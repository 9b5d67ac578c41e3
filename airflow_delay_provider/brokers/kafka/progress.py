"""Which records of one partition are done, although they end in any order; pure.

Kafka remembers one offset of a partition and a note of up to 4095 characters with it. The offset is that of the first
record that is not done, and the note names all others that were begun and are not done. Whoever goes on from there
handles exactly what is not done: what lies between and is not named is done, or no record at all.
"""

from __future__ import annotations

from base64 import b85decode, b85encode
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

#: With fewer open records than this, or a shorter way from the first to the last one, the note always fits.
FEW_OPEN = 700
SHORT_SPAN = 24_000
_BITMAP, _STEPS = "b", "s"
#: Stands between a note and the id of its topic, and in neither of them.
_ID = " "


class Committed(Protocol):
    """What Kafka remembers of a partition."""

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
        #: Nothing from here on was begun.
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
        """Whether a record may be begun before another one ends; one that was begun before a crash has its room."""
        return offset < self.next or len(self.open) < FEW_OPEN or offset - self.low < SHORT_SPAN

    def is_crowded(self) -> bool:
        """Whether half of the room is used: what can end without harm should."""
        return 2 * len(self.open) > FEW_OPEN and 2 * (self.next - self.low) > SHORT_SPAN

    def begin(self, offset: int) -> bool:
        """Note that a record is in hand and return whether there is anything to do for it."""
        if offset < self.next:
            return offset in self.open
        self.open[offset] = None
        self._begun.append(offset)
        self.next = offset + 1
        return True

    def end(self, offset: int) -> None:
        """Note that a record is done."""
        del self.open[offset]

    def is_waiting(self, offset: int) -> bool:
        """Whether the record is not done, begun or not."""
        return offset >= self.next or offset in self.open

    def note(self) -> str:
        """Return what must be remembered besides ``low``; nothing where every record begun is done."""
        if not self.open:
            return ""
        low = self.low
        span = self.next - low
        # The shorter one as a rule, and never a bitmap of a wide gap.
        write = _bitmap if 8 * len(self.open) > span else _steps
        return f"{span}:{write(self.open, low)}"


def progress_of(
    committed: Committed,
    starts: Mapping[tuple[str, int], int],
    *,
    ends: Mapping[tuple[str, int], int] | None = None,
    topic_id: str = "",
) -> Progress:
    """Return the progress that a group has committed; where it has none, it begins with the first record there is.

    So it does where the topic is another one than that of the progress: it was deleted and created again.
    """
    where = (committed.topic, committed.partition)
    if committed.offset < 0:
        return Progress(starts[where])
    note, _, noted_id = (committed.metadata or "").partition(_ID)
    end = committed.offset if ends is None else ends[where]
    if (noted_id and topic_id and noted_id != topic_id) or (committed.offset > end and noted_id != topic_id):
        return Progress(starts[where])
    # The end of a log that has lost records is before what was done.
    return Progress(committed.offset, note) if committed.offset <= end else Progress(end)


def note_of(progress: Progress, topic_id: str) -> str:
    """Return what is committed beside the offset: the note, and the topic that it is about."""
    return f"{progress.note()}{_ID}{topic_id}" if topic_id else progress.note()


def _bitmap(offsets: Iterable[int], low: int) -> str:
    bits = bytearray()
    for offset in offsets:
        byte, bit = divmod(offset - low, 8)
        if byte >= len(bits):
            bits.extend(bytes(byte + 1 - len(bits)))
        bits[byte] |= 1 << bit
    return _BITMAP + b85encode(bits).decode()


def _steps(offsets: Iterable[int], low: int) -> str:
    """The distances from one to the next, seven bits a byte, the last byte of each marked."""
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
