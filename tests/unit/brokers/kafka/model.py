"""Kafka as far as the promises of a partition rest on it, in memory: logs with gaps, notes, transactions, fencing."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import AVAILABLE, ChannelCheck, ChannelStatus
from airflow_delay_provider.brokers.kafka.dispatch.partition import Partition
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import PartitionQueue, Record
from airflow_delay_provider.brokers.kafka.journal import EncodedEntry, decode_entries
from airflow_delay_provider.brokers.kafka.progress import Progress
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.brokers.kafka.topology import Topology

#: What Kafka keeps beside an offset, without the id of the topic and the space before it.
MAX_NOTE = 4095 - 23
#: A channel that cannot be written to.
MISSING = "missing"


@dataclass(slots=True)
class Log:
    """One partition: records in the order of their offsets, with gaps that look like finished records."""

    records: list[Record] = field(default_factory=list)
    start: int = 0
    end: int = 0

    def append(self, *parts: object) -> int:
        """Store a record under the next offset."""
        self.records.append(Record(self.end, *parts))  # type: ignore[arg-type]
        self.end += 1
        return self.end - 1

    def skip(self, count: int) -> None:
        """Use up offsets for nothing that is ever read: marks of transactions, and records of aborted ones."""
        self.end += count

    def read(self, offset: int, limit: int | None = None) -> list[Record]:
        """Return the records from an offset on."""
        first = bisect_left(self.records, offset, key=attrgetter("offset"))
        return self.records[first:] if limit is None else self.records[first : first + limit]

    def trim(self, offset: int) -> None:
        """Remove the records before an offset."""
        self.records, self.start = self.read(offset), max(self.start, offset)


class Delivered(NamedTuple):
    """A message in its channel."""

    at_ms: int
    envelope: wire.Envelope


class SimulatedKafka:
    """One partition of a ladder, and what readers of committed records can see."""

    def __init__(self, topology: Topology, partition: int) -> None:
        self.topology = topology
        self.partition = partition
        rungs = [topology.rung(hold_ms) for hold_ms in topology.ladder.holds_ms]
        self.logs = {topic: Log() for topic in (topology.control, topology.inbox, *rungs)}
        self.committed: dict[str, tuple[int, str]] = {}
        self.recalled: set[RecordPosition] = set()
        self.journal: list[EncodedEntry] = []
        self.delivered: list[Delivered] = []
        self.dead: list[Record] = []
        #: What is known of channels other than that they are good, and which ones were announced.
        self.checks: dict[str, ChannelCheck] = {}
        self.expected: set[str] = set()
        #: How often each message was put into a rung.
        self.rests: Counter[bytes] = Counter()
        self.longest_note = 0
        #: The broker's clock.
        self.now_ms = 0
        #: Counts the members that were given the partition; only the last one may commit.
        self.generation = 0

    def progress(self, topic: str) -> Progress:
        """Return the committed progress of a topic, as a new reader sees it."""
        return Progress(*self.committed.get(topic, (self.logs[topic].start, "")))

    def waiting(self) -> Iterator[tuple[str, Record]]:
        """Return every record that is not done, as :mod:`recalling` finds them."""
        for topic, log in self.logs.items():
            if log.records:
                progress = self.progress(topic)
                yield from ((topic, each) for each in log.read(progress.low) if progress.is_waiting(each.offset))

    def trim(self) -> None:
        """Remove records before the committed offsets."""
        for topic, (offset, _) in self.committed.items():
            self.logs[topic].trim(offset)


class Transaction:
    """Everything that a partition gives out; nothing of it is to be seen before the commit."""

    def __init__(self, kafka: SimulatedKafka) -> None:
        self._kafka = kafka
        self._effects: list[Callable[[], object]] = []
        self._touched: set[str] = set()
        self._entries: list[EncodedEntry] = []
        self.size = 0

    def put_into_rung(self, partition: int, hold_ms: int, key: bytes, value: bytes) -> None:
        kafka = self._kafka
        self.size += len(value)
        assert partition == kafka.partition
        topic = kafka.topology.rung(hold_ms)
        self._touched.add(topic)
        self._effects.append(partial(kafka.logs[topic].append, kafka.now_ms, key, value))
        # Those that wait for their channel come on top, as many as that needs.
        if wire.held_until_ms(key) <= wire.Envelope(key, value).deliver_at_ms:
            self._effects.append(partial(kafka.rests.update, [key[8:]]))

    def expect(self, channel: str) -> None:
        self._kafka.expected.add(channel)

    def check(self, position: RecordPosition, envelope: wire.Envelope) -> ChannelCheck:
        assert position.partition == self._kafka.partition
        if envelope.channel == MISSING:
            return ChannelCheck(ChannelStatus.REFUSED, "there is no such topic")
        return self._kafka.checks.get(envelope.channel, AVAILABLE)

    def deliver(self, position: RecordPosition, envelope: wire.Envelope, now_ms: int) -> None:
        assert position.partition == self._kafka.partition
        self.size += len(envelope.payload)
        self._effects.append(partial(self._kafka.delivered.append, Delivered(now_ms, envelope)))

    def dead_letter(
        self, position: RecordPosition, record: Record, reason: str, *, most_bytes: int = 15_000_000
    ) -> None:
        assert position.partition == self._kafka.partition
        assert reason
        self.size += min(record.size, most_bytes)
        self._effects.append(partial(self._kafka.dead.append, record))

    def record_entry(self, partition: int, entry: bytes) -> None:
        assert partition == self._kafka.partition
        self._entries.extend(decode_entries(entry))

    def record_recall(self, position: RecordPosition, *, recalled: bool) -> None:
        known = self._kafka.recalled
        self._effects.append(partial(known.add if recalled else known.discard, position))

    def commit(self, progress: list[tuple[str, int, str]]) -> None:
        """Make all of it visible, with the marks that a transaction leaves in the logs."""
        for effect in self._effects:
            effect()
        for topic in self._touched:
            self._kafka.logs[topic].skip(1)
        self._kafka.journal += self._entries
        for topic, offset, note in progress:
            self._kafka.committed[topic] = (offset, note)
            self._kafka.longest_note = max(self._kafka.longest_note, len(note))

    def abort(self) -> None:
        """Leave nothing but gaps."""
        for topic in self._touched:
            self._kafka.logs[topic].skip(2)


class Dispatcher:
    """A member of the group that was given the partition, and builds it as the dispatcher does."""

    def __init__(self, kafka: SimulatedKafka) -> None:
        kafka.generation += 1
        self.generation = kafka.generation
        self._kafka = kafka
        self._transaction = Transaction(kafka)
        topology = kafka.topology
        queues = {
            topic: PartitionQueue(topic, topology.hold_of(topic) or 0, kafka.progress(topic))
            for topic in sorted(kafka.logs)
        }
        self.partition = Partition(
            kafka.partition,
            topology.ladder,
            queues,
            inbox=topology.inbox,
            control=topology.control,
            recalled=set(kafka.recalled),
        )
        self._read_to = {topic: queue.progress.low for topic, queue in queues.items()}

    def fetch(self, topic: str, limit: int | None = None) -> None:
        """Read some more records of a topic."""
        log, start = self._kafka.logs[topic], self._read_to[topic]
        if start < log.end and (records := log.read(start, limit)):
            self._read_to[topic] = records[-1].offset + 1
            for record in records:
                self.partition.queues[topic].add(record)

    def fetch_all(self) -> None:
        """Read everything there is."""
        for topic in self._read_to:
            self.fetch(topic)

    def advance(self, now_ms: int, *, limit: int = 2000) -> int:
        """Do what there is to do."""
        partition, transaction = self.partition, self._transaction
        return partition.process_ready(transaction, now_ms, limit=limit) + partition.deliver_due(
            transaction, now_ms, limit=limit
        )

    def commit(self) -> bool:
        """End the transaction and begin another; a member that has lost the partition is refused."""
        transaction, self._transaction = self._transaction, Transaction(self._kafka)
        if self.generation != self._kafka.generation:
            transaction.abort()
            return False
        transaction.commit(list(self.partition.progress()))
        self.partition.committed()
        return True

    def roll_back(self) -> None:
        """Abort the transaction, and continue from the last commit with the records in memory."""
        transaction, self._transaction = self._transaction, Transaction(self._kafka)
        transaction.abort()
        self.partition.roll_back()

    def crash(self) -> None:
        """Lose everything that is not committed."""
        self._transaction.abort()
