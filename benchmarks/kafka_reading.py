"""Consumers of the Kafka benchmark: readers of committed records with the library's defaults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, TopicPartition

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.reading import take
from benchmarks.kafka_node import PARTITIONS
from benchmarks.measuring import MismatchError

SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A message in its channel; milliseconds since the epoch."""

    message_id: bytes
    deliver_at: int
    #: When the dispatcher wrote it.
    written_at: int
    #: When the consumer got it.
    seen_at: float


def read_all(bootstrap: str, topic: str, n: int) -> list[Message]:
    """Return the first ``n`` records of a topic."""
    return [record for records, _ in _read(bootstrap, topic, n, SECONDS) for record in records]


def watch(pipe: Connection, bootstrap: str, topic: str, n: int, seconds: float) -> None:
    """See messages come, in a process of its own; say when that begins, and then what was seen."""
    batches = list(_read(bootstrap, topic, n, seconds, started=pipe))
    pipe.send([_seen(record, at) for records, at in batches for record in records])


def _read(
    bootstrap: str, topic: str, n: int, seconds: float, *, started: Connection | None = None
) -> Iterator[tuple[list[Message], float]]:
    settings = {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "log_level": 0}
    deadline, found = time.monotonic() + seconds, 0
    with Consumer({**settings, "isolation.level": "read_committed"}) as consumer:
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
        consumer.poll(0.1)
        if started is not None:
            started.send("begin")
        while found < n:
            records, now = take(consumer, 0.5), time.time() * 1000
            for record in records:
                if record.error() is not None:
                    raise KafkaException(record.error())
            found += len(records)
            yield records, now
            if time.monotonic() > deadline:
                raise MismatchError(f"topic {topic}: found {found} of {n} records after {seconds:g} s")


def _seen(record: Message, at: float) -> Seen:
    headers = dict(record.headers() or ())
    return Seen(headers[wire.ID], int(headers[wire.DELIVER_AT]), record.timestamp()[1], at)
