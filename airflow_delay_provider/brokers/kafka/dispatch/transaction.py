"""Kafka transactions: everything that partitions write, together with their progress, all or nothing."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.client import (
    BATCH_BYTES,
    CALL_SECONDS,
    GONE_SECONDS,
    KafkaClients,
    call_until_done,
)
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import PURGED, ChannelCheck, ChannelStatus
from airflow_delay_provider.brokers.kafka.dispatch.channels import BATCH_OVERHEAD_BYTES, Channels, size_of
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.brokers.kafka.dispatch.refusals import RecordRefusedError
from airflow_delay_provider.brokers.kafka.journal import is_result
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.brokers.kafka.wire import MOST_BYTES, dead_letter_of

#: A partition that has written so many bytes continues after they are committed. Otherwise messages that are due a
#: moment later, and other partitions, would wait until the broker has stored all of them.
TAKE_BYTES = 500_000
#: How long a new dispatcher may have to wait for the transaction of one that was killed.
TAKE_OVER_SECONDS = 90.0
#: How long a transaction stays open: consumers of a channel see its messages only when it ends.
OPEN_SECONDS_IF_AWAITED = 0.025
OPEN_SECONDS = 0.1
JOURNAL_RECORD_BYTES = 500_000
#: How often a commit checks the records in transit.
SLICE_SECONDS = 0.05
#: How long one attempt to abort waits for records in transit.
ABORT_SECONDS = 0.1
#: A channel that accepts so much at once accepts any batch of small messages.
WIDE_BYTES = 2 * BATCH_BYTES


class Transaction(Protocol):
    """Collects everything that a partition writes, to be committed with its progress."""

    @property
    def size(self) -> int:
        """The bytes in the transaction."""
        ...

    def expect(self, channel: str) -> None:
        """Learn that a message is delivered to a channel soon."""
        ...

    def check(self, position: RecordPosition, envelope: wire.Envelope) -> ChannelCheck:
        """Return whether a message can be written to its channel, as far as that is known."""
        ...

    def put_into_rung(self, partition: int, hold_ms: int, key: bytes, value: bytes) -> None:
        """Put an envelope into a rung."""
        ...

    def deliver(self, position: RecordPosition, envelope: wire.Envelope, now_ms: int) -> None:
        """Put a message into its channel."""
        ...

    def dead_letter(self, position: RecordPosition, record: Record, reason: str, *, most_bytes: int = ...) -> None:
        """Put a record into the dead-letter topic, cut to ``most_bytes``."""
        ...

    def record_entry(self, partition: int, entry: bytes) -> None:
        """Append an entry to the journal."""
        ...

    def record_recall(self, position: RecordPosition, *, recalled: bool) -> None:
        """Record that a record must be skipped, or need not be any more."""
        ...


class ChannelRefusedError(KafkaException):  # type: ignore[misc]  # the library has no types
    """A channel refused a message; its messages are checked one by one from now on."""


class KafkaTransaction:
    """Writes for all partitions of one dispatcher, one transaction after another.

    Failures are raised; the caller aborts and repeats.
    """

    def __init__(self, producer: Producer, topology: Topology, channels: Channels) -> None:
        self._producer = producer
        self._topology = topology
        self._channels = channels
        self.expect = channels.expect
        self._rungs = {hold_ms: topology.rung(hold_ms) for hold_ms in topology.ladder.holds_ms}
        self._begun_at: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._begun_at = None
        #: The bytes in it.
        self.size = 0
        #: Whether the broker was asked to commit: it may have done so in spite of an error.
        self.is_committing = False
        #: Whether it contains the answer to a command.
        self._is_awaited = False
        self._entries: dict[int, list[bytes]] = defaultdict(list)
        self.dispatched: Counter[str] = Counter()
        self.lateness_ms: list[int] = []
        #: Bytes for each channel that accepts less at once than a batch may have.
        self._narrow: dict[str, int] = {}
        #: Channels of messages that were refused before: one in each transaction.
        self._full: set[str] = set()
        #: Why records for a channel, or for the ladder, were not stored.
        self._refused: KafkaError | None = None
        self._broken: KafkaError | None = None

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        return self._begun_at is not None

    def seconds_left(self) -> float:
        """Return how long the transaction may stay open."""
        if self._begun_at is None:
            return OPEN_SECONDS
        if self.size >= TAKE_BYTES:
            return 0.0
        most = OPEN_SECONDS_IF_AWAITED if self.lateness_ms or self._is_awaited else OPEN_SECONDS
        return self._begun_at + most - time.monotonic()

    # -- writing -------------------------------------------------------------------------------------------------

    def put_into_rung(self, partition: int, hold_ms: int, key: bytes, value: bytes) -> None:
        """Put an envelope into a rung."""
        self._produce(self._rungs[hold_ms], value, key, partition)

    def deliver(self, position: RecordPosition, envelope: wire.Envelope, now_ms: int) -> None:
        """Put a message into its channel."""
        channel = envelope.channel

        def on_failure(error: KafkaError | None, _record: Any, position: RecordPosition = position) -> None:
            if error is not None and error.code() not in PURGED:
                self._refused = error
                self._channels.note_failure(position, channel, error)

        if self._channels.has_failed(position):
            self._full.add(channel)
        elif self._max_bytes_of(channel) < WIDE_BYTES:
            self._narrow[channel] = self._narrow.get(channel, BATCH_OVERHEAD_BYTES) + size_of(envelope)
        self._produce(
            channel, envelope.payload, envelope.key, headers=envelope.record_headers(), on_delivery=on_failure
        )
        self._channels.forget(position)
        self.dispatched[channel] += 1
        self.lateness_ms.append(now_ms - envelope.deliver_at_ms)

    def check(self, position: RecordPosition, envelope: wire.Envelope) -> ChannelCheck:
        """Return whether a message can be written to its channel; unknown if the channel is full for now."""
        check = self._channels.check(position, envelope)
        if check.status is ChannelStatus.AVAILABLE and not self._has_room(position, envelope):
            return ChannelCheck(ChannelStatus.UNKNOWN)
        return check

    def _has_room(self, position: RecordPosition, envelope: wire.Envelope) -> bool:
        channel = envelope.channel
        if channel in self._full or (self.dispatched[channel] and self._channels.has_failed(position)):
            return False
        return channel not in self._narrow or self._narrow[channel] + size_of(envelope) <= self._max_bytes_of(channel)

    def _max_bytes_of(self, channel: str) -> int:
        return self._channels.max_bytes_of(channel) or 0

    def dead_letter(
        self, position: RecordPosition, record: Record, reason: str, *, most_bytes: int = MOST_BYTES
    ) -> None:
        """Put a record that cannot be delivered into the dead-letter topic, as a message if it is one."""
        self._channels.forget(position)
        key, value, headers = dead_letter_of(position, record, reason, most_bytes=most_bytes)
        self._produce(self._topology.dead, value, key, headers=headers)

    def record_entry(self, partition: int, entry: bytes) -> None:
        """Append an entry to the journal; those of one transaction share a record."""
        self._begin()
        self.size += len(entry)
        self._entries[partition].append(entry)
        self._is_awaited = self._is_awaited or is_result(entry)

    def record_recall(self, position: RecordPosition, *, recalled: bool) -> None:
        """Record that a record must be skipped, or need not be any more."""
        self._produce(self._topology.recalls, b"1" if recalled else None, position.key(), position.partition)

    # -- ending --------------------------------------------------------------------------------------------------

    def commit(self, progress: Iterable[tuple[str, int, int, str]], group: Any) -> None:
        """Commit everything together with the progress (topic, partition, offset, note) of this group."""
        self._begin()
        for partition, entries in self._entries.items():
            for value in _joined(entries):
                self._produce(self._topology.journal, value, None, partition)
        offsets = [TopicPartition(topic, partition, offset, note) for topic, partition, offset, note in progress]
        self._await_records()
        if offsets:
            call_until_done(lambda seconds: self._producer.send_offsets_to_transaction(offsets, group, seconds))
        self.is_committing = True
        call_until_done(self._producer.commit_transaction)
        self._reset()

    def _await_records(self) -> None:
        """Wait until all records are stored, but not for a channel that is gone by now."""
        deadline = time.monotonic() + CALL_SECONDS
        while self._producer.flush(SLICE_SECONDS):
            if self._refused is not None or self._broken is not None or time.monotonic() > deadline:
                break
            if (channel := self._channels.find_unusable(self.dispatched)) is not None:
                self._refused = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"topic {channel} is not usable any more")
                break
        if self._broken is not None:
            raise RecordRefusedError(self._broken)
        if self._refused is not None:
            raise ChannelRefusedError(self._refused)

    def abort(self) -> None:
        """Abort everything since the last commit; until that succeeds, no transaction can begin."""
        if self._begun_at is not None:
            # Each call drops records to be sent again; the library would send to a deleted topic for two seconds.
            call_until_done(lambda seconds: self._producer.abort_transaction(min(seconds, ABORT_SECONDS)))
            self._reset()

    def give_up(self) -> None:
        """Send nothing more. The broker aborts the transaction after its timeout, or for the next producer."""
        self._producer.purge(blocking=False)

    # -- pieces --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._begun_at is None:
            self._producer.begin_transaction()
            self._begun_at = time.monotonic()

    def _produce(self, topic: str, value: bytes | None, key: bytes | None, partition: int = -1, **options: Any) -> None:
        self._begin()
        self.size += (
            len(value or b"") + len(key or b"") + sum(len(each[1] or b"") for each in options.get("headers", ()))
        )
        options.setdefault("on_delivery", self._on_broken)
        while True:
            try:
                self._producer.produce(topic, value, key, partition, **options)
            except BufferError:
                self._producer.poll(0.05)
            else:
                return

    def _on_broken(self, error: KafkaError | None, _record: Any) -> None:
        if error is not None and error.code() not in PURGED:
            self._broken = error


def _joined(entries: list[bytes]) -> Iterable[bytes]:
    part: list[bytes] = []
    size = 0
    for entry in entries:
        if part and size + len(entry) > JOURNAL_RECORD_BYTES:
            yield b"".join(part)
            part, size = [], 0
        part.append(entry)
        size += len(entry)
    if part:
        yield b"".join(part)


def open_transaction(clients: KafkaClients, name: str, channels: Channels) -> KafkaTransaction:
    """Start a producer of this name; it aborts the transaction that an earlier one left open."""
    topology = clients.config.topology
    producer = clients.make_producer(
        {
            "transactional.id": f"{topology.prefix}.{name}",
            "transaction.timeout.ms": GONE_SECONDS * 1000,
            "message.timeout.ms": GONE_SECONDS * 1000,
            # A transaction begins before the broker has quite ended the one before: retry at once.
            "retry.backoff.ms": 5,
            "retry.backoff.max.ms": 500,
            "linger.ms": 5,
            "queue.buffering.max.messages": 500_000,
        }
    )
    # The library looks for a coordinator every half second while no node is connected. The first answer names the
    # nodes, and the second one comes from one of them.
    for _ in range(2):
        clients.ask(lambda: producer.list_topics(topology.journal, 5.0), "looking for the nodes")
    clients.ask(lambda: producer.init_transactions(10.0), "starting to dispatch", seconds=TAKE_OVER_SECONDS)
    return KafkaTransaction(producer, topology, channels)
