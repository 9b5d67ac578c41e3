"""Reads records of the ladder as the plain dispatcher does, and turns them into frames. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from airflow_delay_provider.brokers.kafka import header_protocol, wire
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.brokers.kafka.topology import MAX_VALUE_BYTES, Topology
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.spark.streaming.frames import Frame, Kind
from airflow_delay_provider.spark.streaming.routing import CLOCK, PASSING, Routing

#: Bytes of an unreadable command that are kept as a dead letter.
COMMAND_CUT_BYTES = 1_000
#: A shard and a bucket.
Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What dispatchers had done with the records of one partition when this service began."""

    #: No record from here on was begun.
    next: int = 0
    #: Records before it whose messages still wait: the journal contains these.
    open: frozenset[int] = frozenset()
    #: Records to skip.
    recalled: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Turns records into frames, and says where each belongs."""

    topology: Topology
    routing: Routing
    begun: Mapping[tuple[str, int], Begun] = field(default_factory=dict)

    def read(self, records: Iterable[tuple[str, int, Record]]) -> dict[Place, list[Frame]]:
        """Return the frames of records (topic, partition, record) by shard and bucket."""
        found: dict[Place, list[Frame]] = defaultdict(list)
        seen: dict[tuple[str, int], tuple[int, int]] = {}
        for topic, partition, record in records:
            held_ms = 0
            for place, frame in self._frames_of(topic, partition, record):
                found[place].append(frame)
                if frame.kind in (Kind.ACCEPTED, Kind.HELD):
                    held_ms = self.routing.ends_ms(place[1])
            last, latest_ms = seen.get((topic, partition), (0, 0))
            seen[topic, partition] = (max(last, record.offset + 1), max(latest_ms, held_ms))
        for (topic, partition), (offset, held_ms) in seen.items():
            found[0, CLOCK].append(Frame(Kind.SEEN, topic, partition, offset, held_ms))
        return found

    def _frames_of(self, topic: str, partition: int, record: Record) -> Iterator[tuple[Place, Frame]]:
        begun = self.begun.get((topic, partition), Begun())
        again = record.offset < begun.next
        if again and record.offset not in begun.open:
            return
        if record.offset in begun.recalled:
            key = RecordPosition(topic=topic, partition=partition, offset=record.offset).key()
            yield self._pass(Frame(Kind.WRITE, self.topology.recalls, partition, record.offset, 0, key, None))
            return
        most_bytes = wire.MOST_BYTES
        try:
            if topic == self.topology.control:
                most_bytes = COMMAND_CUT_BYTES
                yield self._read_command(topic, partition, record, again=again)
            else:
                yield self._read_message(topic, partition, record, again=again)
        except Exception as error:  # noqa: BLE001 - any program may write to the ladder, and none may stop it
            yield self._dead_letter(topic, partition, record, error, most_bytes)

    def _read_message(self, topic: str, partition: int, record: Record, *, again: bool) -> tuple[Place, Frame]:
        is_new = topic == self.topology.inbox and not again
        key, value = self._envelope_of(topic, partition, record)
        envelope = wire.Envelope(key, value)
        envelope.check()
        held_until_ms = wire.held_until_ms(key)
        if held_until_ms > header_protocol.MAX_MS:
            raise InvalidMessageError("deliver_at", f"{held_until_ms} is out of range", "use milliseconds since 1970")
        place = self.routing.shard_of(wire.order_of(envelope)), self.routing.bucket_of(held_until_ms)
        kind = Kind.ACCEPTED if is_new else Kind.HELD
        return place, Frame(kind, topic, partition, record.offset, held_until_ms, key, value)

    def _envelope_of(self, topic: str, partition: int, record: Record) -> tuple[bytes, bytes]:
        """Return key and value of the envelope that a record is or asks for."""
        if record.size > MAX_VALUE_BYTES:
            raise InvalidMessageError(
                "payload", f"{record.size} bytes are too many for the ladder", f"send {MAX_VALUE_BYTES} at most"
            )
        if topic == self.topology.inbox and record.headers:
            return wire.encode_request(
                default_id=f"{topic}-{partition}-{record.offset}",
                key=record.key,
                value=record.value,
                headers=record.headers,
                timestamp_ms=record.timestamp_ms,
            )
        if record.key is None or len(record.key) < 9 or record.value is None:
            required = f"name at least {header_protocol.CHANNEL} and {header_protocol.DELIVER_AT}"
            raise InvalidMessageError("headers", "are missing", required)
        return record.key, record.value

    def _read_command(self, topic: str, partition: int, record: Record, *, again: bool) -> tuple[Place, Frame]:
        command = Command.decode(record.value or b"")
        if again:
            # It was accepted, and the message waits in this record since.
            moved = Record(record.offset, record.timestamp_ms, _key_of(command), command.envelope)
            return self._read_message(topic, partition, moved, again=True)
        if command.held_until_ms is None or command.order is None:
            raise InvalidMessageError(
                "command", "does not say until when its record is held", "send it with this version of the package"
            )
        place = self.routing.shard_of(command.order), self.routing.bucket_of(command.held_until_ms)
        return place, Frame(Kind.COMMAND, topic, partition, record.offset, 0, None, record.value)

    def _dead_letter(
        self, topic: str, partition: int, record: Record, error: Exception, most_bytes: int
    ) -> tuple[Place, Frame]:
        position = RecordPosition(topic=topic, partition=partition, offset=record.offset)
        reason = str(error) or type(error).__name__
        key, value, headers = wire.dead_letter_of(position, record, reason, most_bytes=most_bytes)
        return self._pass(Frame(Kind.WRITE, self.topology.dead, -1, record.offset, 0, key, value, headers))

    def _pass(self, frame: Frame) -> tuple[Place, Frame]:
        return (frame.offset % self.routing.shards, PASSING), frame


def _key_of(command: Command) -> bytes:
    return wire.encode_key(command.deliver_at_ms, command.message_id)
