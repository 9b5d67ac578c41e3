"""The shared consumer on Kafka: it reads without joining the group of the channel, so it takes no message."""

from __future__ import annotations

import time
from collections.abc import Mapping

from confluent_kafka import TopicPartition

from airflow_delay_provider.brokers.consumer import BATCH, Bound, SharedConsumer, View
from airflow_delay_provider.brokers.kafka import admin
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.progress import Progress, progress_of
from airflow_delay_provider.brokers.kafka.reader import PartitionId, Reader, log_starts
from airflow_delay_provider.brokers.kafka.receive import decode_record, group_of
from airflow_delay_provider.domain.exceptions import DelayError
from airflow_delay_provider.domain.message import Message

#: How often the progress of the channel's consumers is read.
PROGRESS_SECONDS = 1.0
#: How often new partitions are noticed and, while no message waits, a group whose offsets were reset.
PARTITIONS_SECONDS = 30.0
#: How long reading the progress may take.
ASK_SECONDS = 10.0
#: How long the broker keeps a request for records open.
PATIENCE_MS = 500


class KafkaSharedConsumer(SharedConsumer):
    """One reader for each topic, open while a sensor waits for its messages."""

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._topics: dict[str, WatchedTopic] = {}

    def look(self, bounds: Mapping[str, Bound]) -> Mapping[str, View]:
        for name in set(self._topics) - set(bounds):
            self._topics.pop(name).close()
        views = dict[str, View]()
        for name, bound in bounds.items():
            try:
                if name not in self._topics:
                    self._topics[name] = WatchedTopic(self._clients, name)
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
    """The messages of one topic that the channel's consumer group has not settled."""

    def __init__(self, clients: KafkaClients, name: str) -> None:
        self._clients = clients
        self._partitions: list[PartitionId] = [
            (name, number) for number in range(admin.require_channel(clients, name).partitions)
        ]
        self._reader = Reader(clients, group=group_of(clients, name), patience_ms=PATIENCE_MS)
        self._waiting: dict[tuple[int, int], Message] = {}
        self._progress = self._ask_progress()
        self._asked_at = self._counted_at = time.monotonic()
        self._reader.start({where: each.low for where, each in self._progress.items()})

    def look(self, bound: Bound) -> list[Message]:
        """Return the first messages of the topic."""
        now = time.monotonic()
        if now >= self._counted_at + PARTITIONS_SECONDS:
            self._notice_new_partitions(now)
        # While no message waits, the group can only have been reset.
        if now >= self._asked_at + (PROGRESS_SECONDS if self._waiting else PARTITIONS_SECONDS):
            self._forget_settled(now)
        while len(self._waiting) < bound.messages and self._bytes() < bound.bytes:
            came = list(self._reader.take(0.0, most=min(BATCH, bound.messages - len(self._waiting))))
            for where, record in came:
                if not isinstance(record, int) and self._progress[where].is_waiting(record.offset()):
                    self._waiting[where[1], record.offset()] = decode_record(record).message
            if not came:
                break
        return list(self._waiting.values())

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _bytes(self) -> int:
        return sum(len(message.payload) for message in self._waiting.values())

    def _forget_settled(self, now: float) -> None:
        before, self._progress = self._progress, self._ask_progress()
        self._asked_at = now
        name = self._partitions[0][0]
        self._waiting = {
            (number, offset): message
            for (number, offset), message in self._waiting.items()
            if self._progress[name, number].is_waiting(offset)
        }
        if any(self._progress[where].low < before[where].low for where in self._partitions):
            # The offsets of the group were reset: settled messages are back.
            self._waiting = {}
            self._reader.start({where: each.low for where, each in self._progress.items()})

    def _notice_new_partitions(self, now: float) -> None:
        name, known = self._partitions[0][0], len(self._partitions)
        self._counted_at = now
        self._partitions = [(name, number) for number in range(admin.require_channel(self._clients, name).partitions)]
        if len(self._partitions) != known:
            self._progress, self._waiting = self._ask_progress(), {}
            self._reader.start({where: each.low for where, each in self._progress.items()})

    def _ask_progress(self) -> dict[PartitionId, Progress]:
        starts = log_starts(self._clients, [TopicPartition(*each) for each in self._partitions])
        committed = self._reader.committed(self._partitions, seconds=ASK_SECONDS)
        return {(each.topic, each.partition): progress_of(each, starts) for each in committed}
