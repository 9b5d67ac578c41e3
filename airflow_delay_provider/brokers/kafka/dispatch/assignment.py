"""The partitions that the consumer group has assigned to this dispatcher."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, TopicPartition

from airflow_delay_provider.brokers.kafka.admin import LadderTopic
from airflow_delay_provider.brokers.kafka.client import GONE_SECONDS, KafkaClients
from airflow_delay_provider.brokers.kafka.dispatch.partition import Partition
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import PartitionQueue
from airflow_delay_provider.brokers.kafka.dispatch.refusals import Isolation
from airflow_delay_provider.brokers.kafka.dispatch.transaction import TAKE_OVER_SECONDS, KafkaTransaction
from airflow_delay_provider.brokers.kafka.progress import progress_of
from airflow_delay_provider.brokers.kafka.reader import PartitionId, Reader, log_ends, log_starts
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.brokers.kafka.verify import complete_partitions

log = logging.getLogger(__name__)

#: A dispatcher that runs but does not poll for so long loses its partitions.
STUCK_SECONDS = 60


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
        starts, ends = log_starts(self._clients, readable), log_ends(self._clients, readable)
        recalled = self._read_recalls({each.partition for each in readable})
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

    def _read_recalls(self, numbers: set[int]) -> Mapping[int, set[RecordPosition]]:
        found = {number: set[RecordPosition]() for number in numbers}
        partitions = [TopicPartition(self._topology.recalls, number) for number in numbers]
        ends, starts = log_ends(self._clients, partitions), log_starts(self._clients, partitions)
        for record in self._reader.read_between(starts, ends):
            number, key = record.partition(), record.key()
            if key is not None and (position := _position_of(key, number)) is not None:
                change = found[number].discard if record.value() is None else found[number].add
                change(position)
        return found


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


def _position_of(key: bytes, partition: int) -> RecordPosition | None:
    try:
        return RecordPosition.from_key(key, partition)
    except ValueError:
        # Another program wrote it.
        return None
