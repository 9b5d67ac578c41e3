"""Reading partitions from one offset to another, as a member of no consumer group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from airflow_delay_provider.exceptions import BrokerError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.link import Link

BATCH = 1000
#: How long nothing may come.
SILENCE_SECONDS = 30.0

#: A topic and the number of one of its partitions.
Partition = tuple[str, int]


def take(consumer: Consumer, wait: float, *, most: int = BATCH) -> list[Message]:
    """Return what is there, after waiting for the first record only."""
    first = consumer.poll(wait)
    return [] if first is None else [first, *(consumer.consume(most - 1, 0) if most > 1 else ())]


class Reader:
    """A consumer that reads what it is told to, opened when it is first used."""

    def __init__(self, link: Link, *, group: str | None = None, patience_ms: int = 10) -> None:
        """Make one.

        :param group: whose progress it asks for.
        :param patience_ms: how long the broker may wait for more before it says that the end is reached.
        """
        self._link = link
        self._settings: dict[str, Any] = {"enable.partition.eof": True, "fetch.wait.max.ms": patience_ms}
        if group is not None:
            self._settings["group.id"] = group
        self._opened: Consumer | None = None
        self._known_topics: set[str] = set()

    @property
    def _consumer(self) -> Consumer:
        if self._opened is None:
            self._opened = self._link.make_consumer(self._settings)
        return self._opened

    def close(self) -> None:
        """Let go of it; it is opened again when it is used again."""
        if self._opened is not None:
            self._link.close_consumer(self._opened)
            self._opened = None
            self._known_topics.clear()

    def committed(self, places: Sequence[Partition], *, seconds: float) -> list[TopicPartition]:
        """Return the progress of the group, as offsets and notes; decided means after open transactions."""
        question = [TopicPartition(*each) for each in places]
        answer: list[TopicPartition] = self._link.ask(
            lambda: self._consumer.committed(question, 10.0), "reading the progress", seconds=seconds
        )
        return answer

    def start(self, starts: Mapping[Partition, int]) -> None:
        """Begin to read at these offsets."""
        for topic in {topic for topic, _ in starts} - self._known_topics:
            # A topic that the library has not heard of is first looked at by a timer of a second.
            self._link.ask(partial(self._consumer.list_topics, topic, self._link.try_seconds), f"looking for {topic}")
            self._known_topics.add(topic)
        self._consumer.assign([TopicPartition(*each, offset) for each, offset in starts.items()])

    def stop(self) -> None:
        """Read nothing more."""
        if self._opened is not None:
            self._opened.unassign()

    def take(self, wait: float, *, most: int = BATCH) -> Iterator[tuple[Partition, Message | int]]:
        """Return where something came from, and the record, or the offset of the end that was reached."""
        for record in take(self._consumer, wait, most=most):
            where, error = (record.topic(), record.partition()), record.error()
            if error is None:
                yield where, record
            elif error.code() == KafkaError._PARTITION_EOF:
                yield where, record.offset()
            else:
                raise self._link.failure(error, f"reading {where[0]}")

    def read_between(self, starts: Mapping[Partition, int], ends: Mapping[Partition, int]) -> Iterator[Message]:
        """Read all partitions side by side up to their ends.

        An end may lie behind a transaction that is still open: the reader waits until that is decided.
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
                    # The next one who reads begins with a new client.
                    self.close()
                    raise BrokerError(f"{self._link.config.name}: {topic} could not be read to its end; try again")
        finally:
            self.stop()
