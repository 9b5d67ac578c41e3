"""Writes the frames of one shard: deliveries, journal, rungs and dead letters, in Kafka transactions.

Each transaction also commits how far the shard has come, as the offset of a consumer group of its own: the number of
the micro-batch, and how many frames of it are written. So a micro-batch that Spark repeats, after a crash or in another
attempt of a task, continues where the last committed transaction ended.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.client import BATCH_BYTES, KafkaClients, call_until_done
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import PURGED, ChannelCheck, ChannelStatus, check_of
from airflow_delay_provider.brokers.kafka.dispatch.channels import BATCH_OVERHEAD_BYTES, size_of
from airflow_delay_provider.brokers.kafka.dispatch.partition import UNAVAILABLE_MS
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.brokers.kafka.journal import encode_left
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.domain.clock import SystemClock, floor_ms
from airflow_delay_provider.spark.streaming.channel_facts import ChannelFacts
from airflow_delay_provider.spark.streaming.frames import Frame, Kind
from airflow_delay_provider.spark.streaming.processor import to_rung

log = logging.getLogger(__name__)

#: Most frames and bytes in one transaction.
MOST_FRAMES = 10_000
MOST_BYTES = 8_000_000
JOURNAL_RECORD_BYTES = 500_000
#: After a crash, readers of committed records wait so long at most for a transaction that was left open.
TRANSACTION_MS = 30_000
#: How long a shard is written again while the broker does not answer. Then the task fails.
PATIENCE_SECONDS = 120.0
PAUSE_SECONDS = 0.5
#: A message that failed is written alone then, and its next failure is a verdict. Of more failures at once, the others
#: wait again.
MOST_ALONE = 50
_FENCED = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
T = TypeVar("T")


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


class ShardWriter:
    """Writes the frames of one shard, exactly once for readers of committed records.

    Guarantees: the frames of a micro-batch are the same, and in the same order, whenever Spark repeats it. A
    transaction contains some of them and the number of those that are written. A writer starts by fencing all earlier
    writers of this shard and then reads that number, so no two write the same frame. The number is kept by the broker
    for ``offsets.retention.minutes`` after the last one was committed; only a service that was killed between its last
    transaction and Spark's own commit, and is restarted after that time, writes those frames again.
    """

    def __init__(self, config: KafkaConfig, service_id: str, shard: int) -> None:
        self._clients = KafkaClients(config)
        self._topology = config.topology
        self._service_id = service_id
        self._name = f"{config.topology.prefix}.spark.{shard}"
        self._facts = ChannelFacts(self._clients)
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._clock = SystemClock()
        #: Whether the last transaction may have been committed in spite of an error.
        self._is_doubtful = False

    def write(self, frames: Iterable[Frame], batch: int) -> Written:
        """Write the frames of a micro-batch that are not written yet, and return what was written."""
        written, position = Written(), 0
        done = self._patiently(lambda: self._find_done(batch))
        for chunk in _chunks(frames):
            start, position = position, position + len(chunk)
            if position > done:
                self._write_chunk(chunk, start, batch, max(0, done - start), written)
        return written

    def _write_chunk(self, chunk: Sequence[Frame], start: int, batch: int, skip: int, written: Written) -> None:
        def attempt() -> None:
            # An earlier attempt may have been committed in spite of its error.
            done = max(start + skip, self._find_done(batch) if self._is_doubtful else 0)
            self._is_doubtful = False
            if done < start + len(chunk):
                self._commit(chunk[done - start :], batch, start + len(chunk), written)

        self._patiently(attempt)

    def _patiently(self, call: Callable[[], T]) -> T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return call()
            except KafkaException as error:
                self.close()
                self._is_doubtful = True
                if time.monotonic() > deadline:
                    raise self._clients.failure(error, "writing due messages") from error
                if error.args[0].code() in _FENCED:
                    # A task on another executor wrote this shard since, as is usual.
                    continue
                log.warning("%s: cannot write now, and tries again: %s", self._name, error.args[0].str())
                time.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        """Drop the producer; the broker aborts an open transaction when the next one starts."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge(blocking=False)
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._clients.close_consumer(consumer)

    # -- the number of frames that are written -------------------------------------------------------------------

    def _find_done(self, batch: int) -> int:
        """Fence earlier writers, and return how many frames of this micro-batch are written."""
        self._require_producer()
        (found,) = self._require_consumer().committed([self._marker(-1, "")], 10.0)
        service_id, _, count = (found.metadata or "").partition(" ")
        if service_id != self._service_id or found.offset < batch:
            return 0
        if found.offset > batch:
            raise RuntimeError(f"micro-batch {batch} of {self._name} was written by another job; stop one of them")
        return int(count)

    def _marker(self, batch: int, metadata: str) -> TopicPartition:
        return TopicPartition(self._topology.journal, 0, batch, metadata)

    def _require_producer(self) -> Producer:
        if self._producer is None:
            producer = self._clients.make_producer(
                {
                    "transactional.id": self._name,
                    "transaction.timeout.ms": TRANSACTION_MS,
                    "message.timeout.ms": TRANSACTION_MS,
                    "retry.backoff.ms": 5,
                    "retry.backoff.max.ms": 500,
                    "linger.ms": 5,
                    "queue.buffering.max.messages": 500_000,
                }
            )
            producer.list_topics(self._topology.journal, 5.0)
            producer.init_transactions(30.0)
            self._producer = producer
        return self._producer

    def _require_consumer(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self._clients.make_consumer({"group.id": self._name})
        return self._consumer

    # -- one transaction -----------------------------------------------------------------------------------------

    def _commit(self, chunk: Sequence[Frame], batch: int, done: int, written: Written) -> None:
        """Commit a transaction with these frames; messages that the broker refuses are dead-lettered or wait again."""
        verdicts: dict[int, ChannelCheck] = {}
        alone: set[int] = set()
        while True:
            attempt = _Transaction(self._require_producer(), self._facts, self._topology, floor_ms(self._clock.now()))
            try:
                attempt.fill(chunk, verdicts, alone)
            except RecordsRefusedError as refused:
                self._abort()
                self._facts.forget()
                for index, error in refused.errors.items():
                    if index in alone or len(alone) >= MOST_ALONE:
                        verdicts[index] = check_of(error)
                    else:
                        alone.add(index)
                continue
            producer, group = self._require_producer(), self._require_consumer().consumer_group_metadata()
            marker = [self._marker(batch, f"{self._service_id} {done}")]
            call_until_done(lambda seconds: producer.send_offsets_to_transaction(marker, group, seconds))
            call_until_done(producer.commit_transaction)
            attempt.count(written)
            return

    def _abort(self) -> None:
        try:
            call_until_done(self._require_producer().abort_transaction)
        except KafkaException:
            # The broker may not know the transaction, if its first channel was deleted.
            self.close()


class _Transaction:
    """One attempt to write frames."""

    def __init__(self, producer: Producer, facts: ChannelFacts, topology: Any, now_ms: int) -> None:
        self._producer = producer
        self._facts = facts
        self._topology = topology
        self._now_ms = now_ms
        self._entries: dict[int, list[bytes]] = defaultdict(list)
        self._errors: dict[int, KafkaError] = {}
        self._broken: KafkaError | None = None
        self._narrow: Counter[str] = Counter()
        self._written = Written()

    def fill(self, chunk: Sequence[Frame], verdicts: dict[int, ChannelCheck], alone: set[int]) -> None:
        """Write everything and wait until it is stored."""
        self._producer.begin_transaction()
        self._facts.learn({each for frame in chunk if (each := _channel_of(frame)) is not None})
        for index, frame in enumerate(chunk):
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
        status, reason = verdict or self._facts.check(envelope)
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
            if index is None:
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


def _chunks(frames: Iterable[Frame]) -> Iterator[list[Frame]]:
    """Return the frames of one transaction after the other."""
    chunk, size = list[Frame](), 0
    for frame in frames:
        more = len(frame.value or b"") + 100
        if chunk and (len(chunk) >= MOST_FRAMES or size + more > MOST_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(frame)
        size += more
    if chunk:
        yield chunk


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
