"""How many records are fetched into memory, and which partitions make no progress."""

from __future__ import annotations

import time
from collections.abc import Mapping

from confluent_kafka import Consumer, TopicPartition

from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import PartitionQueue
from airflow_delay_provider.brokers.kafka.reader import PartitionId

#: A partition with fewer records in memory is always fetched.
FEW = 200
#: How far ahead records are fetched. Resuming takes up to half a second.
NEAR_MS = 4_000
FAR_MS = 8_000
#: Most records of one partition in memory, however soon they are due.
MANY = 20_000
CHECK_SECONDS = 0.05
STALL_CHECK_SECONDS = 2.0
#: A partition is stalled if its first record is overdue and makes no progress for so long.
STALL_SECONDS = 30.0


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
        much = [each for each, queue in queues.items() if len(queue.waiting) >= FEW]
        full = [each for each in much if each not in self._paused and _is_full(queues[each], now_ms)]
        hungry = [each for each in self._paused if each in queues and _is_hungry(queues[each], now_ms)]
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


def _is_full(queue: PartitionQueue, now_ms: int) -> bool:
    waiting = queue.waiting
    return len(waiting) >= MANY or (len(waiting) >= FEW and queue.ready_ms(waiting[-1]) > now_ms + FAR_MS)


def _is_hungry(queue: PartitionQueue, now_ms: int) -> bool:
    waiting = queue.waiting
    if len(waiting) >= MANY // 2:
        return False
    return len(waiting) < FEW // 2 or queue.ready_ms(waiting[-1]) < now_ms + NEAR_MS


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
