"""The stateful part of the query: messages wait in buckets, and leave when their bucket has ended, or are recalled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import SLACK_MS
from airflow_delay_provider.brokers.kafka.journal import encode_entry, encode_result, encode_scheduled
from airflow_delay_provider.brokers.kafka.recall import Command
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.ladder import Ladder
from airflow_delay_provider.spark.streaming.frames import Frame, Kind, pack, unpack
from airflow_delay_provider.spark.streaming.routing import CLOCK, Routing

#: What the query groups by and what the processor returns. ``turn`` orders rows of one bucket.
INPUT = "shard int, bucket long, frames binary"
OUTPUT = "shard int, bucket long, turn int, frames binary"
STATE = "frames binary"
#: The name of the state, which a release reads.
STATE_NAME = "held"
ROW_BYTES = 4_000_000
#: Rows of an expired bucket come after those of its input.
TIMER_TURN = 1_000_000


class BucketProcessor(StatefulProcessor):
    """Decides for each message whether it waits, leaves or is recalled.

    Guarantees: a message is delivered in the first micro-batch whose time is not before the end of its bucket, so never
    before it is due by the clock of the driver. A recall is decided here, where the message waits: either it is
    accepted and the message is gone from the state, or the message has left and the recall is refused. State and output
    follow from the input and the time of the micro-batch alone, both of which Spark records before it begins. So a
    micro-batch that is repeated has the same output, in the same order.
    """

    def __init__(self, topology: Topology, routing: Routing) -> None:
        self._topology = topology
        self._routing = routing

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state."""
        self._handle = handle
        self._held = handle.getListState(STATE_NAME, STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Take the new frames of a bucket."""
        shard, bucket = key
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        new = sorted((frame for row in rows for frame in unpack(row.frames)), key=lambda frame: frame.position)
        if bucket == CLOCK:
            frames = [*new, _clock(now_ms)]
        elif bucket < 0:
            frames = new
        else:
            frames = self._take(bucket, new, now_ms)
        yield from _rows(shard, bucket, 0, frames)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
        """Release a bucket that has ended."""
        shard, bucket = key
        yield from _rows(shard, bucket, TIMER_TURN, self._release())

    def close(self) -> None:
        """Nothing is open."""

    # -- pieces --------------------------------------------------------------------------------------------------

    def _take(self, bucket: int, new: Sequence[Frame], now_ms: int) -> list[Frame]:
        waiting = [frame for frame in new if frame.kind is not Kind.COMMAND]
        commands = [frame for frame in new if frame.kind is Kind.COMMAND]
        out = [_scheduled(frame) for frame in waiting if frame.kind is Kind.ACCEPTED]
        has_ended = self._routing.ends_ms(bucket) <= now_ms
        if not (has_ended or commands):
            if not self._held.exists():
                self._handle.registerTimer(self._routing.ends_ms(bucket))
            self._held.appendValue((pack(frame._replace(kind=Kind.HELD) for frame in waiting),))
            return out
        before = self._read()
        held = {frame.position: frame for frame in (*before, *waiting)}
        for command in commands:
            out += recall(held, command, self._topology, now_ms)
        if has_ended or not held:
            self._held.clear()
        else:
            if not before:
                self._handle.registerTimer(self._routing.ends_ms(bucket))
            self._held.put([(pack(frame._replace(kind=Kind.HELD) for frame in held.values()),)])
        return [*out, *_deliveries(held.values())] if has_ended else out

    def _release(self) -> list[Frame]:
        frames = _deliveries(self._read())
        self._held.clear()
        return frames

    def _read(self) -> list[Frame]:
        return [frame for (packed,) in self._held.get() for frame in unpack(packed)]


def recall(
    held: dict[tuple[str, int, int], Frame], command_frame: Frame, topology: Topology, now_ms: int
) -> Iterator[Frame]:
    """Execute a command on the messages of its bucket, and return the answer and what follows from it."""
    command = Command.decode(command_frame.value or b"")
    at, partition = command.position, command_frame.partition
    found = held.pop((at.topic, at.partition, at.offset), None) if at.partition == partition else None
    answer = encode_result(command.id, at_ms=now_ms, accepted=found is not None)
    yield Frame(Kind.ENTRY, "", partition, command_frame.offset, 0, None, answer)
    if found is None:
        return
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


def _clock(now_ms: int) -> Frame:
    """Return the time of the micro-batch, which the driver learns in this way alone."""
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
