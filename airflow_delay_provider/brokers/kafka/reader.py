"""Reading partitions without joining a consumer group."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.domain.exceptions import BrokerError

BATCH = 1000
#: How long to wait for the next record.
SILENCE_SECONDS = 30.0
#: A topic and the number of one of its partitions.
PartitionId = tuple[str, int]


def take(consumer: Consumer, wait: float, *, most: int = BATCH) -> list[Message]:
    """Return available records, waiting only for the first one."""
    first = consumer.poll(wait)
    return [] if first is None else [first, *(consumer.consume(most - 1, 0) if most > 1 else ())]


class Reader:
    """A consumer with assigned partitions, opened when it is first used."""

    def __init__(self, clients: KafkaClients, *, group: str | None = None, patience_ms: int = 10) -> None:
        """Make one.

        :param group: the group whose progress it reads.
        :param patience_ms: how long the broker may wait for more records before it reports the end.
        """
        self._clients = clients
        self._settings: dict[str, Any] = {"enable.partition.eof": True, "fetch.wait.max.ms": patience_ms}
        if group is not None:
            self._settings["group.id"] = group
        self._opened: Consumer | None = None
        self._known_topics: set[str] = set()

    @property
    def _consumer(self) -> Consumer:
        if self._opened is None:
            self._opened = self._clients.make_consumer(self._settings)
        return self._opened

    def close(self) -> None:
        """Close the consumer; the next use opens it again."""
        if self._opened is not None:
            self._clients.close_consumer(self._opened)
            self._opened = None
            self._known_topics.clear()

    def committed(self, partitions: Sequence[PartitionId], *, seconds: float) -> list[TopicPartition]:
        """Return the committed offsets and notes of the group, after open transactions have ended."""
        question = [TopicPartition(*each) for each in partitions]
        answer: list[TopicPartition] = self._clients.ask(
            lambda: self._consumer.committed(question, 10.0), "reading the progress", seconds=seconds
        )
        return answer

    def start(self, starts: Mapping[PartitionId, int]) -> None:
        """Start reading at these offsets."""
        for topic in {topic for topic, _ in starts} - self._known_topics:
            # Without this, the library describes an unknown topic only after a second.
            self._clients.ask(
                partial(self._consumer.list_topics, topic, self._clients.try_seconds), f"looking for {topic}"
            )
            self._known_topics.add(topic)
        self._consumer.assign([TopicPartition(*each, offset) for each, offset in starts.items()])

    def stop(self) -> None:
        """Stop reading."""
        if self._opened is not None:
            self._opened.unassign()

    def take(self, wait: float, *, most: int = BATCH) -> Iterator[tuple[PartitionId, Message | int]]:
        """Return partitions with a record, or with the offset of their end if it was reached."""
        for record in take(self._consumer, wait, most=most):
            where, error = (record.topic(), record.partition()), record.error()
            if error is None:
                yield where, record
            elif error.code() == KafkaError._PARTITION_EOF:
                yield where, record.offset()
            else:
                raise self._clients.failure(error, f"reading {where[0]}")

    def read_between(self, starts: Mapping[PartitionId, int], ends: Mapping[PartitionId, int]) -> Iterator[Message]:
        """Read all partitions side by side up to their ends.

        If an end lies behind an open transaction, the reader waits until that has ended.
        """
        missing = {each: ends[each] for each in starts if starts[each] < ends[each]}
        if not missing:
            return
        self.start({each: starts[each] for each in missing})
        deadline = time.monotonic() + SILENCE_SECONDS
        try:
            while missing:
                for where, record in self.take(0.1):
                    reached = record if isinstance(record, int) else record.offset() + 1
                    if not isinstance(record, int):
                        deadline = time.monotonic() + SILENCE_SECONDS
                        yield record
                    if reached >= missing.get(where, 0):
                        missing.pop(where, None)
                if time.monotonic() > deadline:
                    topic = next(iter(missing))[0]
                    # The next call starts with a new client.
                    self.close()
                    raise BrokerError(f"{self._clients.config.name}: {topic} could not be read to its end; try again")
        finally:
            self.stop()


def log_ends(clients: KafkaClients, partitions: Iterable[TopicPartition]) -> dict[PartitionId, int]:
    """Return the offset behind the last record of each partition, committed or not."""
    return _offsets(clients, {each: OffsetSpec.latest() for each in partitions})


def log_starts(clients: KafkaClients, partitions: Iterable[TopicPartition]) -> dict[PartitionId, int]:
    """Return the offset of the first record of each partition."""
    return _offsets(clients, {each: OffsetSpec.earliest() for each in partitions})


def stable_ends(clients: KafkaClients, partitions: Iterable[TopicPartition]) -> dict[PartitionId, int]:
    """Return the offset behind the last record that consumers of committed records can see."""
    return _offsets(clients, {each: OffsetSpec.latest() for each in partitions}, IsolationLevel.READ_COMMITTED)


def _offsets(
    clients: KafkaClients,
    question: dict[TopicPartition, OffsetSpec],
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[PartitionId, int]:
    if not question:
        return {}

    def ask() -> dict[PartitionId, int]:
        answers = clients.admin().list_offsets(question, isolation_level=isolation, request_timeout=clients.try_seconds)
        found = {(each.topic, each.partition): future.result().offset for each, future in answers.items()}
        if any(offset < 0 for offset in found.values()):
            # The library reports no error if the node that led a partition is gone.
            raise KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
        return found

    offsets: dict[PartitionId, int] = clients.ask(ask, "reading the offsets of topics")
    return offsets
