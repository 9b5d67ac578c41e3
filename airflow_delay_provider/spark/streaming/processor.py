"""The stateful part of the query: messages wait in buckets, and leave when their bucket has ended, or are recalled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import SLACK_MS
from airflow_delay_provider.brokers.kafka.journal import encode_entry, encode_result, encode_scheduled
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.ladder import Ladder
from airflow_delay_provider.spark.streaming.frames import Frame, Kind, pack, unpack
from airflow_delay_provider.spark.streaming.routing import CLOCK, Routing

#: What the query groups by and what the processor returns. ``turn`` orders rows of one bucket.
INPUT = "shard int, bucket long, frames binary"
OUTPUT = "shard int, bucket long, turn int, frames binary"
#: A bucket is a map of pieces, each under the number of the first record in it.
PIECE = "piece binary"
STATE = "frames binary"
#: The name of the state, which a release reads.
STATE_NAME = "held"
#: What a piece may have, if it is more than one message. Spark reads and writes a piece at once.
PIECE_BYTES = 1_000_000
#: What the expired buckets of a task release in one micro-batch: Spark collects the output of all timers of a task in
#: memory. The rest follows in the next micro-batches.
RELEASE_BYTES = 32_000_000
ROW_BYTES = 4_000_000
#: Rows of an expired bucket come after those of its input.
TIMER_TURN = 1_000_000
_NUMBERS = Struct(">Iq")


class BucketProcessor(StatefulProcessor):
    """Decides for each message whether it waits, leaves or is recalled.

    Guarantees: a message is delivered in the first micro-batch whose time is not before the end of its bucket, so never
    before it is due by the clock of the driver; if more are due than ``release_bytes``, in one of the next. A recall is
    decided here, where the message waits: either it is accepted and the message is gone from the state, or the message
    has left and the recall is refused. State and output follow from the input and the time of the micro-batch alone,
    both of which Spark records before it begins. So a micro-batch that is repeated has the same output, in the same
    order.
    """

    def __init__(self, topology: Topology, routing: Routing, release_bytes: int = RELEASE_BYTES) -> None:
        self._topology = topology
        self._routing = routing
        self._release_bytes = release_bytes

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state; a task does this once in each micro-batch."""
        self._handle = handle
        self._held = handle.getMapState(STATE_NAME, PIECE, STATE)
        self._left_bytes = self._release_bytes

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Take the new frames of a bucket."""
        shard, bucket = key
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        if bucket < 0:
            frames = sorted((frame for row in rows for frame in unpack(row.frames)), key=lambda frame: frame.position)
            if bucket == CLOCK:
                frames.append(_clock(now_ms))
        else:
            frames = self._take(bucket, (row.frames for row in rows), now_ms)
        yield from _rows(shard, bucket, 0, frames)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
        """Release a bucket that has ended, or a part of it."""
        shard, bucket = key
        frames, is_empty = self._release()
        if not is_empty:
            # For the next micro-batch, in the same order; Spark deletes the timer that has expired.
            self._handle.registerTimer(expiredTimerInfo.getExpiryTimeInMs() + 1)
            yield from _rows(shard, CLOCK, TIMER_TURN, [_clock(self._routing.ends_ms(bucket))])
        yield from _rows(shard, bucket, TIMER_TURN, frames)

    def close(self) -> None:
        """Nothing is open."""

    # -- pieces --------------------------------------------------------------------------------------------------

    def _take(self, bucket: int, rows: Iterable[bytes], now_ms: int) -> list[Frame]:
        """Keep new messages, and execute commands; a bucket that has ended is released after that, by its timer."""
        out, commands = list[Frame](), list[Frame]()
        is_new = not self._held.exists()
        for piece in pieces(rows):
            waiting = [frame for frame in piece if frame.kind is not Kind.COMMAND]
            commands += (frame for frame in piece if frame.kind is Kind.COMMAND)
            out += (_scheduled(frame) for frame in waiting if frame.kind is Kind.ACCEPTED)
            if waiting:
                held = pack(frame._replace(kind=Kind.HELD) for frame in waiting)
                self._held.updateValue((name_of(waiting[0]),), (held,))
                if is_new:
                    self._handle.registerTimer(self._routing.ends_ms(bucket))
                    is_new = False
        out.sort(key=lambda frame: frame.position)
        commands.sort(key=lambda frame: frame.position)
        return [*out, *self._recall(commands, now_ms)] if commands else out

    def _recall(self, commands: Sequence[Frame], now_ms: int) -> list[Frame]:
        """Execute commands, and drop the messages that they take, one piece after the other."""
        wanted = {_tuple_of(Command.decode(each.value or b"").position) for each in commands}
        found = {
            frame.position: name
            for name, packed in self._pieces()
            for frame in unpack(packed)
            if frame.position in wanted
        }
        waiting = set(found)
        out = [frame for command in commands for frame in recall(waiting, command, self._topology, now_ms)]
        for name in sorted({name for position, name in found.items() if position not in waiting}):
            (packed,) = self._held.getValue((name,)) or (b"",)
            left = [frame for frame in unpack(packed) if frame.position not in found or frame.position in waiting]
            if left:
                self._held.updateValue((name,), (pack(left),))
            else:
                self._held.removeKey((name,))
        return out

    def _release(self) -> tuple[list[Frame], bool]:
        """Take messages until this micro-batch has enough, and return whether the bucket is empty then."""
        frames, taken = list[Frame](), list[bytes]()
        if self._left_bytes <= 0:
            return frames, False
        for name, packed in self._pieces():
            if self._left_bytes <= 0:
                for each in taken:
                    self._held.removeKey((each,))
                return _deliveries(frames), False
            frames += unpack(packed)
            taken.append(name)
            self._left_bytes -= len(packed)
        self._held.clear()
        return _deliveries(frames), True

    def _pieces(self) -> Iterator[tuple[bytes, bytes]]:
        for (name,), (packed,) in self._held.iterator():
            yield bytes(name), bytes(packed)


def pieces(rows: Iterable[bytes], most_bytes: int = PIECE_BYTES) -> Iterator[list[Frame]]:
    """Return the new frames of a bucket in pieces that are the same in whatever order the rows come.

    That is one piece if they are few. Otherwise each row is cut by itself: all its frames are of one partition.
    """
    rest, few, size = iter(rows), list[bytes](), 0
    for row in rest:
        few.append(row)
        size += len(row)
        if size > most_bytes:
            break
    else:
        yield sorted((frame for row in few for frame in unpack(row)), key=lambda frame: frame.position)
        return
    for row in chain(few, rest):
        part, size = list[Frame](), 0
        for frame in unpack(row):
            more = len(frame.value or b"")
            if part and size + more > most_bytes:
                yield part
                part, size = [], 0
            part.append(frame)
            size += more
        yield part


def name_of(frame: Frame) -> bytes:
    """Return what a piece that begins with this frame is stored under."""
    return b"%b\0%b" % (frame.topic.encode(), _NUMBERS.pack(frame.partition, frame.offset))


def recall(
    waiting: set[tuple[str, int, int]], command_frame: Frame, topology: Topology, now_ms: int
) -> Iterator[Frame]:
    """Execute a command on the messages of its bucket, and return the answer and what follows from it."""
    command = Command.decode(command_frame.value or b"")
    at, partition = _tuple_of(command.position), command_frame.partition
    is_accepted = at in waiting and command.position.partition == partition
    answer = encode_result(command.id, at_ms=now_ms, accepted=is_accepted)
    yield Frame(Kind.ENTRY, "", partition, command_frame.offset, 0, None, answer)
    if not is_accepted:
        return
    waiting.discard(at)
    entry = encode_entry(
        command.change,
        at_ms=now_ms,
        deliver_at_ms=command.deliver_at_ms,
        message_id=command.message_id.encode(),
        channel=command.channel,
    )
    yield Frame(Kind.ENTRY, "", partition, command_frame.offset, 0, None, entry)
    if command.envelope:
        key = wire.encode_key(command.deliver_at_ms, command.message_id)
        yield to_rung(topology, partition, key, command.envelope, now_ms)


def to_rung(topology: Topology, partition: int, key: bytes, value: bytes, now_ms: int) -> Frame:
    """Return the record with which a message waits in a rung: for this service, or for a plain dispatcher after it."""
    ladder: Ladder = topology.ladder
    hold_ms = ladder.next_hold(wire.held_until_ms(key) - now_ms - SLACK_MS) or ladder.tick_ms
    return Frame(Kind.WRITE, topology.rung(hold_ms), partition, -1, 0, key, value)


def _tuple_of(position: RecordPosition) -> tuple[str, int, int]:
    return position.topic, position.partition, position.offset


def _clock(now_ms: int) -> Frame:
    """Return a time for the driver: that of the micro-batch, or that of a bucket that has not left wholly."""
    return Frame(Kind.CLOCK, "", 0, 0, now_ms)


def _rows(shard: int, bucket: int, turn: int, frames: Sequence[Frame]) -> Iterator[Row]:
    """Return frames as rows of a moderate size."""
    part, size = list[Frame](), 0
    for frame in frames:
        part.append(frame)
        size += len(frame.value or b"")
        if size > ROW_BYTES:
            yield Row(shard=shard, bucket=bucket, turn=turn, frames=pack(part))
            part, size, turn = [], 0, turn + 1
    if part:
        yield Row(shard=shard, bucket=bucket, turn=turn, frames=pack(part))


def _scheduled(frame: Frame) -> Frame:
    value = frame.value or b""
    entry = encode_scheduled(wire.Envelope(frame.key or b"", value), value)
    return Frame(Kind.ENTRY, "", frame.partition, frame.offset, 0, None, entry)


def _deliveries(frames: Iterable[Frame]) -> list[Frame]:
    return [frame._replace(kind=Kind.DELIVER) for frame in sorted(frames, key=lambda frame: frame.order)]
