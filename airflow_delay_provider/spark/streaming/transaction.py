"""One transaction of a shard: its frames as records, checked against their channels."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.client import BATCH_BYTES
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import PURGED, ChannelCheck, ChannelStatus
from airflow_delay_provider.brokers.kafka.dispatch.channels import BATCH_OVERHEAD_BYTES, size_of
from airflow_delay_provider.brokers.kafka.dispatch.partition import UNAVAILABLE_MS
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.brokers.kafka.journal import encode_left
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.spark.streaming.channel_facts import ChannelFacts
from airflow_delay_provider.spark.streaming.frames import Frame, Kind
from airflow_delay_provider.spark.streaming.processor import to_rung

JOURNAL_RECORD_BYTES = 500_000
#: After a crash, readers of committed records wait so long at most for a transaction that was left open.
TRANSACTION_MS = 30_000
#: Another producer has taken the place of this one. That is fatal, and later calls only say so.
FENCED = {
    KafkaError._FENCED,
    KafkaError._FATAL,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
}


@dataclass(kw_only=True)
class Written:
    """What was written, for the figures of the micro-batch."""

    accepted: int = 0
    delivered: int = 0
    dead: int = 0
    moved: int = 0
    waits_again: int = 0
    recalled: int = 0
    lateness_ms: list[int] = field(default_factory=list)


class RecordsRefusedError(Exception):
    """The broker has refused messages, so their transaction cannot be committed."""

    def __init__(self, errors: dict[int, KafkaError]) -> None:
        super().__init__(f"{len(errors)} messages are refused")
        self.errors = errors


class ShardTransaction:
    """One attempt to write frames."""

    def __init__(self, producer: Producer, facts: ChannelFacts, topology: Topology, now_ms: int) -> None:
        self._producer = producer
        self._facts = facts
        self._topology = topology
        self._now_ms = now_ms
        self._entries: dict[int, list[bytes]] = defaultdict(list)
        self._errors: dict[int, KafkaError] = {}
        self._broken: KafkaError | None = None
        self._narrow: Counter[str] = Counter()
        self._written = Written()

    def fill(self, chunk: Sequence[Frame], first: int, verdicts: dict[int, ChannelCheck], alone: set[int]) -> None:
        """Write all frames from ``first`` on and wait until they are stored."""
        self._facts.learn({each for frame in chunk if (each := _channel_of(frame)) is not None})
        self._producer.begin_transaction()
        for index, frame in enumerate(chunk[first:], first):
            match frame.kind:
                case Kind.WRITE:
                    self._produce(frame)
                    self._written.dead += frame.topic == self._topology.dead
                    self._written.moved += self._topology.hold_of(frame.topic) is not None
                case Kind.ENTRY:
                    self._note_entry(frame)
                case Kind.DELIVER:
                    self._deliver(index, frame, verdicts.get(index), is_alone=index in alone)
                case _:
                    pass
        # Journal last: what it says has happened.
        for partition, entries in self._entries.items():
            for value in _joined(entries):
                self._produce(Frame(Kind.WRITE, self._topology.journal, partition, -1, 0, None, value))
        self._flush()
        if self._errors:
            raise RecordsRefusedError(self._errors)

    def count(self, written: Written) -> None:
        """Add what was written."""
        for name, value in vars(self._written).items():
            setattr(written, name, getattr(written, name) + value)

    def _note_entry(self, frame: Frame) -> None:
        entry = frame.value or b""
        self._entries[frame.partition].append(entry)
        self._written.accepted += entry[:1] == b"\x01"
        self._written.recalled += entry[:1] in (b"\x03", b"\x04", b"\x05")

    def _deliver(self, index: int, frame: Frame, verdict: ChannelCheck | None, *, is_alone: bool) -> None:
        envelope = wire.Envelope(frame.key or b"", frame.value or b"")
        known = self._facts.check(envelope)
        status, reason = verdict if verdict is not None and known.status is ChannelStatus.AVAILABLE else known
        if status is ChannelStatus.UNAVAILABLE:
            key = wire.encode_key(self._now_ms + UNAVAILABLE_MS, envelope.message_id.decode())
            self._produce(to_rung(self._topology, frame.partition, key, frame.value or b"", self._now_ms))
            self._written.waits_again += 1
            return
        if status is ChannelStatus.REFUSED:
            self._dead_letter(frame, reason)
            self._entries[frame.partition].append(encode_left(envelope, self._now_ms, refusal=reason))
            self._written.dead += 1
            return
        if is_alone or self._is_full(envelope):
            self._flush()
        self._produce(
            Frame(Kind.WRITE, envelope.channel, -1, -1, 0, envelope.key, envelope.payload, envelope.record_headers()),
            index,
        )
        if is_alone:
            self._flush()
        self._entries[frame.partition].append(encode_left(envelope, self._now_ms))
        self._written.delivered += 1
        self._written.lateness_ms.append(self._now_ms - envelope.deliver_at_ms)

    def _is_full(self, envelope: wire.Envelope) -> bool:
        """Whether a message does not fit into a batch with those before it: the broker refuses a batch as a whole."""
        most = self._facts.max_bytes_of(envelope.channel)
        if most is None or most >= 2 * BATCH_BYTES:
            return False
        size = size_of(envelope)
        self._narrow[envelope.channel] += size
        if self._narrow[envelope.channel] + BATCH_OVERHEAD_BYTES <= most:
            return False
        self._narrow[envelope.channel] = size
        return True

    def _dead_letter(self, frame: Frame, reason: str) -> None:
        position = RecordPosition(topic=frame.topic, partition=frame.partition, offset=frame.offset)
        record = Record(frame.offset, self._now_ms, frame.key, frame.value)
        key, value, headers = wire.dead_letter_of(position, record, reason)
        self._produce(Frame(Kind.WRITE, self._topology.dead, -1, -1, 0, key, value, headers))

    def _produce(self, frame: Frame, index: int | None = None) -> None:
        def note(error: KafkaError | None, _record: Any) -> None:
            if error is None or error.code() in PURGED:
                return
            if index is None or error.code() in FENCED:
                self._broken = error
            else:
                self._errors[index] = error

        while True:
            try:
                self._producer.produce(
                    frame.topic, frame.value, frame.key, frame.partition, headers=frame.headers, on_delivery=note
                )
            except BufferError:
                self._producer.poll(0.05)
            else:
                return

    def _flush(self) -> None:
        """Wait until all records are stored; the first refusal ends it, because nothing can be committed then."""
        deadline = time.monotonic() + TRANSACTION_MS / 1000
        while self._producer.flush(0.1) and not self._errors and self._broken is None:
            if time.monotonic() > deadline:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        if self._broken is not None:
            raise KafkaException(self._broken)
        if self._errors:
            # Learn of the others that were refused with it.
            self._producer.flush(0.1)
            raise RecordsRefusedError(self._errors)


def _channel_of(frame: Frame) -> str | None:
    return wire.channel_of(frame.value or b"") if frame.kind is Kind.DELIVER else None


def _joined(entries: list[bytes]) -> list[bytes]:
    """Return journal records, each with the entries that fit into one."""
    records, part, size = [], list[bytes](), 0
    for entry in entries:
        if part and size + len(entry) > JOURNAL_RECORD_BYTES:
            records.append(b"".join(part))
            part, size = [], 0
        part.append(entry)
        size += len(entry)
    return [*records, b"".join(part)] if part else records
