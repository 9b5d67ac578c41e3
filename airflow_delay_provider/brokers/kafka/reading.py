"""Reading partitions from one offset to another, without a consumer group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, Message, TopicPartition

from airflow_delay_provider.exceptions import BrokerError

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    from airflow_delay_provider.brokers.kafka.link import Link

BATCH = 1000
#: How long nothing may come.
SILENCE_SECONDS = 30.0

#: A topic and the number of one of its partitions.
Partition = tuple[str, int]
#: Settings of a consumer that reads with the functions below.
READER = {"enable.partition.eof": True}


def take(consumer: Consumer, wait: float) -> list[Message]:
    """Return what is there, after waiting for the first record only."""
    first = consumer.poll(wait)
    return [] if first is None else [first, *consumer.consume(BATCH - 1, 0)]


def read_between(
    link: Link, consumer: Consumer, starts: Mapping[Partition, int], ends: Mapping[Partition, int]
) -> Iterator[Message]:
    """Read all partitions side by side up to their ends.

    An end may lie behind a transaction that is still open: the reader waits until that is decided.
    """
    missing = {each: ends[each] for each in starts if starts[each] < ends[each]}
    if not missing:
        return
    consumer.assign([TopicPartition(topic, number, starts[topic, number]) for topic, number in missing])
    deadline = time.monotonic() + SILENCE_SECONDS
    try:
        while missing:
            for record in take(consumer, 0.1):
                where = (record.topic(), record.partition())
                error = record.error()
                if error is None:
                    deadline = time.monotonic() + SILENCE_SECONDS
                    yield record
                    if record.offset() + 1 >= missing.get(where, 0):
                        missing.pop(where, None)
                elif error.code() != KafkaError._PARTITION_EOF:
                    raise link.failure(error, f"reading {where[0]}")
                elif record.offset() >= missing.get(where, 0):
                    missing.pop(where, None)
            if time.monotonic() > deadline:
                topic = next(iter(missing))[0]
                raise BrokerError(f"{link.config.name}: topic {topic} could not be read to its end; try again")
    finally:
        consumer.unassign()
