"""The partitions that the consumer group has assigned to this dispatcher.

They are built from their committed progress. Fetching is paused while many of their records are in memory, stalled
partitions are reported, and records that all messages have left are deleted.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from airflow_delay_provider.brokers.kafka.admin import LadderTopic
from airflow_delay_provider.brokers.kafka.client import DENIED, GONE_SECONDS, KafkaClients, code_of
from airflow_delay_provider.brokers.kafka.dispatch.partition import Partition
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import PartitionQueue
from airflow_delay_provider.brokers.kafka.dispatch.refusals import Isolation
from airflow_delay_provider.brokers.kafka.dispatch.transaction import TAKE_OVER_SECONDS, KafkaTransaction
from airflow_delay_provider.brokers.kafka.progress import progress_of, service_of
from airflow_delay_provider.brokers.kafka.reader import PartitionId, Reader, log_ends, log_starts
from airflow_delay_provider.brokers.kafka.recall import RecordPosition, read_recalls
from airflow_delay_provider.brokers.kafka.verify import complete_partitions
from airflow_delay_provider.domain.exceptions import BrokerError

log = logging.getLogger(__name__)

#: A dispatcher that runs but does not poll for so long loses its partitions.
STUCK_SECONDS = 60
#: A partition with fewer records and bytes in memory is always fetched.
FEW = 200
FEW_BYTES = 1024 * 1024
#: How far ahead records are fetched. Resuming takes up to half a second.
NEAR_MS = 4_000
FAR_MS = 8_000
#: Most records and bytes of one partition in memory, however soon they are due.
MANY = 20_000
MANY_BYTES = 32 * 1024 * 1024
#: How often partitions are checked for too many records, and for stalls.
CHECK_SECONDS = 0.05
STALL_CHECK_SECONDS = 2.0
#: A partition is stalled if its first record is overdue and makes no progress for so long.
STALL_SECONDS = 30.0
#: How often records are deleted, and how long a dispatcher that stops waits for that.
TRIM_SECONDS = 10.0
TRIM_STOP_SECONDS = 5.0


class Assignment:
    """Builds partitions from their committed progress, and forgets them when they are revoked."""

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._topology = clients.config.topology
        self._reader = Reader(clients)
        #: Replaced as a whole when partitions are assigned or revoked.
        self.partitions: dict[int, Partition] = {}
        self.queues: dict[PartitionId, PartitionQueue] = {}

    def clear(self) -> None:
        """Forget all partitions."""
        self.partitions, self.queues = {}, {}

    def close(self) -> None:
        """Close the consumer that reads recalls."""
        self._reader.close()

    def load(
        self,
        consumer: Consumer,
        assigned: Sequence[TopicPartition],
        *,
        topics: Mapping[str, LadderTopic],
        isolation: Isolation,
        transaction: KafkaTransaction | None,
    ) -> None:
        """Build the partitions from their committed progress, and start reading there."""
        self.clear()
        complete = complete_partitions(self._topology, topics)
        readable = [TopicPartition(each.topic, each.partition) for each in assigned if each.partition < complete]
        if not readable:
            return
        committed = self._clients.ask(
            lambda: consumer.committed(readable, 10.0), "reading the progress", seconds=TAKE_OVER_SECONDS
        )
        require_unclaimed(self._clients, committed)
        starts, ends = log_starts(self._clients, readable), log_ends(self._clients, readable)
        recalled = read_recalls(self._clients, self._reader, {each.partition for each in readable})
        by_partition: dict[int, dict[str, PartitionQueue]] = defaultdict(dict)
        for each in committed:
            known = topics.get(each.topic)
            topic_id = "" if known is None else known.id
            progress = progress_of(each, starts, ends=ends, topic_id=topic_id)
            queue = PartitionQueue(each.topic, self._topology.hold_of(each.topic) or 0, progress, topic_id=topic_id)
            by_partition[each.partition][each.topic] = self.queues[each.topic, each.partition] = queue
            queue.given_up.update(isolation.given_up(each.topic, each.partition))
            if each.offset >= 0 and progress.next < each.offset:
                self._start_again(queue, each.partition, recalled[each.partition], transaction)
        self.partitions = {
            number: Partition(
                number,
                self._topology.ladder,
                queues,
                inbox=self._topology.inbox,
                control=self._topology.control,
                recalled=recalled[number],
            )
            for number, queues in sorted(by_partition.items())
        }
        consumer.assign(
            [TopicPartition(topic, number, queue.progress.low) for (topic, number), queue in self.queues.items()]
        )

    def progress(self) -> list[tuple[str, int, int, str]]:
        """Return topic, partition, offset and note of each queue that has progress to commit."""
        return [
            (topic, partition.number, offset, note)
            for partition in self.partitions.values()
            for topic, offset, note in partition.progress()
        ]

    def has_progress(self) -> bool:
        """Whether there is progress to commit."""
        return any(queue.is_changed for queue in self.queues.values())

    def committed(self) -> None:
        """Learn that everything up to now is committed."""
        for partition in self.partitions.values():
            partition.committed()

    def roll_back(self, isolation: Isolation) -> None:
        """Return to the last commit. The partitions are still ours, and nothing since can be committed any more."""
        for partition in self.partitions.values():
            partition.roll_back()
            for queue in partition.queues.values():
                queue.given_up.update(isolation.given_up(queue.topic, partition.number))

    def next_ready_ms(self) -> int | None:
        """Return when there is something to do next, as far as known; None is nothing."""
        moments = (partition.next_ready_ms() for partition in self.partitions.values())
        return min((each for each in moments if each is not None), default=None)

    # -- pieces --------------------------------------------------------------------------------------------------

    def _start_again(
        self,
        queue: PartitionQueue,
        partition: int,
        recalled: set[RecordPosition],
        transaction: KafkaTransaction | None,
    ) -> None:
        """Continue a topic that was created again, or has lost records, and forget recalls of records that are gone."""
        log.warning(
            "%s: topic %s was created again or has lost records: partition %d is read from offset %d on",
            self._clients.config.name,
            queue.topic,
            partition,
            queue.progress.next,
        )
        queue.is_changed = True
        for position in [each for each in recalled if each.topic == queue.topic]:
            recalled.discard(position)
            if transaction is not None:
                transaction.record_recall(position, recalled=False)


def make_group_consumer(clients: KafkaClients, instance: str | None) -> Consumer:
    """Return a member of the group of dispatchers."""
    return clients.make_consumer(
        {
            "group.id": clients.config.topology.dispatch_group,
            # Assigns partition N of every topic to the same member.
            "partition.assignment.strategy": "range",
            "session.timeout.ms": GONE_SECONDS * 1000,
            # A rebalance waits for a member that does not poll.
            "max.poll.interval.ms": STUCK_SECONDS * 1000,
            "heartbeat.interval.ms": 2000,
            "queued.min.messages": 5000,
            "queued.max.messages.kbytes": 65_536,
        }
        | ({"group.instance.id": instance} if instance else {})
    )


def require_unclaimed(clients: KafkaClients, committed: Iterable[TopicPartition]) -> None:
    """Refuse a ladder whose waiting messages another service keeps: their records here are not the whole truth."""
    service = next(filter(None, map(service_of, committed)), None)
    if service is not None:
        raise BrokerError(
            f"{clients.config.name}: a Spark job ({service}) serves the ladder {clients.config.topology.prefix} and"
            " keeps its waiting messages; to end that, stop it and run its dispatch.py with --release, then this"
            " dispatcher continues"
        )


class Backpressure:
    """Pauses and resumes fetching of partitions."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._paused: set[PartitionId] = set()
        self._checked_at = 0.0

    def regulate(self, queues: Mapping[PartitionId, PartitionQueue], now_ms: int) -> None:
        """Check all partitions, a few times a second however often it is called."""
        if time.monotonic() < self._checked_at + CHECK_SECONDS:
            return
        self._checked_at = time.monotonic()
        full = [each for each, queue in queues.items() if each not in self._paused and is_full(queue, now_ms)]
        hungry = [each for each in self._paused if each in queues and is_hungry(queues[each], now_ms)]
        if full:
            self._consumer.pause([TopicPartition(*each) for each in full])
            self._paused.update(full)
        if hungry:
            self._consumer.resume([TopicPartition(*each) for each in hungry])
            self._paused.difference_update(hungry)

    def resume_all(self) -> None:
        """Resume all partitions: revoked ones may be assigned again."""
        if self._paused:
            self._consumer.resume([TopicPartition(*each) for each in self._paused])
            self._paused.clear()


def is_full(queue: PartitionQueue, now_ms: int) -> bool:
    """Whether fetching of a partition pauses."""
    waiting, size = queue.waiting, queue.waiting_bytes
    if len(waiting) < FEW and size < FEW_BYTES:
        return False
    return len(waiting) >= MANY or size >= MANY_BYTES or queue.ready_ms(waiting[-1]) > now_ms + FAR_MS


def is_hungry(queue: PartitionQueue, now_ms: int) -> bool:
    """Whether fetching of a paused partition goes on."""
    waiting, size = queue.waiting, queue.waiting_bytes
    if len(waiting) >= MANY // 2 or size >= MANY_BYTES // 2:
        return False
    has_few = len(waiting) < FEW // 2 and size < FEW_BYTES // 2
    return has_few or queue.ready_ms(waiting[-1]) < now_ms + NEAR_MS


class StallDetector:
    """Finds partitions whose records are overdue and not processed."""

    def __init__(self) -> None:
        #: Descriptions of stalled partitions.
        self.found: list[str] = []
        #: The first open record of each overdue partition, and since when it is the first.
        self._since: dict[PartitionId, tuple[int, float]] = {}
        self._checked_at = 0.0

    def check(self, queues: Mapping[PartitionId, PartitionQueue], now_ms: int) -> None:
        """Check all partitions when it is time."""
        now = time.monotonic()
        if now < self._checked_at + STALL_CHECK_SECONDS:
            return
        self._checked_at, before, self._since = now, self._since, {}
        for where, queue in queues.items():
            if _is_overdue(queue, now_ms):
                low = queue.progress.low
                known = before.get(where)
                self._since[where] = known if known is not None and known[0] == low else (low, now)
        self.found = [
            f"partition {partition} of {topic} makes no progress at offset {low} for {now - since:.0f} s"
            for (topic, partition), (low, since) in self._since.items()
            if now > since + STALL_SECONDS
        ]


def _is_overdue(queue: PartitionQueue, now_ms: int) -> bool:
    return bool(queue.waiting) and queue.next_ready_ms() < now_ms


class Trimmer:
    """Asks the broker every few seconds, without waiting for it, to delete records before the committed offsets.

    If the offsets of the group are ever lost, a dispatcher starts with the first record left, so little is repeated.
    """

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._wanted: dict[PartitionId, int] = {}
        self._asked_at = time.monotonic()
        self._answers: list[Future[Any]] = []
        self._is_denied = False

    def note(self, committed: Iterable[tuple[str, int, int]]) -> None:
        """Learn the first offset of each partition (topic, number, offset) that is not done."""
        for topic, partition, offset in committed:
            self._wanted[topic, partition] = offset

    def trim(self, *, now: bool = False) -> None:
        """Ask when it is time; with ``now`` ask at once, and wait a while for the answers."""
        if not now and time.monotonic() < self._asked_at + TRIM_SECONDS:
            return
        self._asked_at = time.monotonic()
        self._read_answers(TRIM_STOP_SECONDS if now else 0.0)
        wanted, self._wanted = self._wanted, {}
        if not wanted or self._is_denied:
            return
        done = [TopicPartition(topic, partition, offset) for (topic, partition), offset in wanted.items()]
        self._answers = list(self._clients.admin().delete_records(done).values())
        if now:
            self._read_answers(TRIM_STOP_SECONDS)

    def _read_answers(self, seconds: float) -> None:
        failed, deadline = False, time.monotonic() + seconds
        for answer in self._answers:
            try:
                answer.result(timeout=max(0.0, deadline - time.monotonic()))
            except KafkaException as error:
                failed = True
                self._note_refusal(error)
            except TimeoutError:
                log.debug("The broker has not deleted the records yet")
        self._answers = []
        if failed and not self._is_denied:
            self._clients.look_for_leaders()

    def _note_refusal(self, error: KafkaException) -> None:
        if code_of(error) in DENIED and not self._is_denied:
            self._is_denied = True
            log.warning(
                "%s: user %s may not DELETE records, so old records stay on disk; grant it on topics that begin"
                " with %s",
                self._clients.config.name,
                self._clients.config.user,
                self._clients.config.topology.prefix,
            )
