"""The shared consumer on Kafka: it reads along as a member of no group, so nothing is taken or held."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

from airflow_delay_provider.brokers.kafka import administering
from airflow_delay_provider.brokers.kafka.progress import Progress, progress_of
from airflow_delay_provider.brokers.kafka.reading import Partition, Reader
from airflow_delay_provider.brokers.kafka.receiving import group_of, partition_count, read_record
from airflow_delay_provider.brokers.shared_consumer import BATCH, Bound, SharedConsumer, View
from airflow_delay_provider.exceptions import DelayError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.link import Link
    from airflow_delay_provider.domain.message import Message

#: How often the progress of the channel's consumers is asked for.
PROGRESS_SECONDS = 1.0
#: How often a topic is looked at for new partitions and, while nothing waits, for a group that was set back.
PARTITIONS_SECONDS = 30.0
#: How long a question about the progress may take.
ASK_SECONDS = 10.0
#: How long the broker keeps a request for records open.
PATIENCE_MS = 500


class KafkaSharedConsumer(SharedConsumer):
    """One reader a topic, which stays open while anybody waits."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._topics: dict[str, WatchedTopic] = {}

    def look(self, bounds: Mapping[str, Bound]) -> Mapping[str, View]:
        for name in set(self._topics) - set(bounds):
            self._topics.pop(name).close()
        views = dict[str, View]()
        for name, bound in bounds.items():
            try:
                if name not in self._topics:
                    self._topics[name] = WatchedTopic(self._link, name)
                views[name] = self._topics[name].look(bound)
            except DelayError as error:
                if name in self._topics:
                    self._topics.pop(name).close()
                views[name] = error
        return views

    def close(self) -> None:
        while self._topics:
            self._topics.popitem()[1].close()


class WatchedTopic:
    """What lies in one topic and is not settled by the channel's consumer group."""

    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._places: list[Partition] = [(name, number) for number in range(partition_count(link, name))]
        self._reader = Reader(link, group=group_of(link, name), patience_ms=PATIENCE_MS)
        self._waiting: dict[tuple[int, int], Message] = {}
        self._progress = self._ask_progress()
        self._asked_at = self._counted_at = time.monotonic()
        self._reader.start({where: each.low for where, each in self._progress.items()})

    def look(self, bound: Bound) -> list[Message]:
        """Return what waits at the head of the topic."""
        now = time.monotonic()
        if now >= self._counted_at + PARTITIONS_SECONDS:
            self._notice_new_partitions(now)
        # Where nothing waits, the group can only have been set back.
        if now >= self._asked_at + (PROGRESS_SECONDS if self._waiting else PARTITIONS_SECONDS):
            self._forget_settled(now)
        while len(self._waiting) < bound.messages and self._bytes() < bound.bytes:
            came = list(self._reader.take(0.0, most=min(BATCH, bound.messages - len(self._waiting))))
            for where, record in came:
                if not isinstance(record, int) and self._progress[where].is_waiting(record.offset()):
                    self._waiting[where[1], record.offset()] = read_record(record).message
            if not came:
                break
        return list(self._waiting.values())

    def close(self) -> None:
        """Read no more."""
        self._reader.close()

    def _bytes(self) -> int:
        return sum(len(message.payload) for message in self._waiting.values())

    def _forget_settled(self, now: float) -> None:
        before, self._progress = self._progress, self._ask_progress()
        self._asked_at = now
        name = self._places[0][0]
        self._waiting = {
            (number, offset): message
            for (number, offset), message in self._waiting.items()
            if self._progress[name, number].is_waiting(offset)
        }
        if any(self._progress[where].low < before[where].low for where in self._places):
            # Somebody has set the group back: what was settled is there again.
            self._waiting = {}
            self._reader.start({where: each.low for where, each in self._progress.items()})

    def _notice_new_partitions(self, now: float) -> None:
        name, known = self._places[0][0], len(self._places)
        self._counted_at = now
        self._places = [(name, number) for number in range(partition_count(self._link, name))]
        if len(self._places) != known:
            self._progress, self._waiting = self._ask_progress(), {}
            self._reader.start({where: each.low for where, each in self._progress.items()})

    def _ask_progress(self) -> dict[Partition, Progress]:
        starts = administering.log_starts(self._link, [TopicPartition(*each) for each in self._places])
        committed = self._reader.committed(self._places, seconds=ASK_SECONDS)
        return {(each.topic, each.partition): progress_of(each, starts) for each in committed}
