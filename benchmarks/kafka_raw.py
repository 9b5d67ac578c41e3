"""What Kafka's own client does without us, which is what we are compared with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.link import CONSUMER
from airflow_delay_provider.brokers.kafka.wire import Headers
from benchmarks.kafka_leaps import Arrived
from benchmarks.measuring import expect

#: Records of one transaction.
COMMIT_EVERY = 5_000
CONSUME = 1_000
#: As safe as ours: confirmed by all replicas in sync, and each record once.
CONFIRMED = {"acks": "all", "enable.idempotence": True}
LARGE_BUFFER = {"queue.buffering.max.messages": 1_000_000, "queue.buffering.max.kbytes": 1_000_000}


class RawProducer:
    """Produces and counts the delivery reports."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, **CONFIRMED})
        self._reported = 0

    def produce(self, topic: str, payloads: Sequence[bytes]) -> None:
        """Return when the broker has confirmed all payloads."""
        self._reported, produce, note = 0, self._producer.produce, self._note
        for payload in payloads:
            produce(topic, payload, on_delivery=note)
        self._producer.flush(60)
        expect("delivery reports", self._reported, len(payloads))

    def request(self, inbox: str, channel: str, items: Sequence[tuple[str, bytes, int]]) -> None:
        """Schedule by headers, as anybody may who can write to Kafka: id, payload and due time."""
        self._reported, produce, note, where = 0, self._producer.produce, self._note, channel.encode()
        for message_id, payload, due_ms in items:
            headers = [(wire.ID, message_id.encode()), (wire.CHANNEL, where), (wire.DELIVER_AT, b"%d" % due_ms)]
            produce(inbox, payload, headers=headers, on_delivery=note)
        self._producer.flush(60)
        expect("delivery reports", self._reported, len(items))

    def _note(self, error: Any, _record: Any) -> None:
        if error is not None:
            raise KafkaException(error)
        self._reported += 1


class Filling:
    """Records in a transaction that is open: written, and seen by no reader until :meth:`show`."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": uuid4().hex, **LARGE_BUFFER})
        self._producer.init_transactions(30)

    def write(self, topic: str, records: Iterable[tuple[bytes | None, bytes, int, Headers | None]]) -> None:
        """Write records: key, value, partition, headers."""
        self._producer.begin_transaction()
        for key, value, partition, headers in records:
            self._producer.produce(topic, value, key, partition, **({"headers": headers} if headers else {}))
            self._producer.poll(0)
        expect("records that could not be written", self._producer.flush(60), 0)

    def show(self) -> float:
        """Let readers see them, and return the moment before that."""
        begin = time.monotonic()
        self._producer.commit_transaction(30)
        return begin


def copy(pipe: Connection, bootstrap: str, source: str, target: str, records: int, with_headers: bool) -> None:
    """Consume, produce, commit, every 5000 records one transaction: the least that is exactly once."""
    group = f"bench-{uuid4().hex[:8]}"
    # Reading ahead as far as the dispatcher does.
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, **CONSUMER, "group.id": group, "queued.max.messages.kbytes": 65_536}
    )
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            **CONFIRMED,
            "transactional.id": group,
            "queue.buffering.max.messages": 500_000,
        }
    )
    producer.init_transactions(30)
    assigned: list[TopicPartition] = []
    consumer.subscribe([source], on_assign=lambda _, partitions: assigned.extend(partitions))
    while not assigned:
        consumer.poll(0.1)
    pipe.send("begin")
    cpu = time.process_time()
    copied = _copy(consumer, producer, target, records, with_headers=with_headers)
    pipe.send(Arrived(dispatched=copied, rests=0, ended_at=time.monotonic(), cpu_seconds=time.process_time() - cpu))
    consumer.close()


def _copy(consumer: Consumer, producer: Producer, target: str, records: int, *, with_headers: bool) -> int:
    copied = 0
    while copied < records:
        offsets, begun = dict[tuple[str, int], int](), 0
        producer.begin_transaction()
        while begun < min(COMMIT_EVERY, records - copied):
            for record in consumer.consume(min(CONSUME, COMMIT_EVERY - begun), 0.05):
                if record.error() is not None:
                    raise KafkaException(record.error())
                if with_headers:
                    producer.produce(target, record.value(), record.key(), headers=record.headers())
                else:
                    producer.produce(target, record.value(), record.key())
                offsets[record.topic(), record.partition()] = record.offset() + 1
                begun += 1
            producer.poll(0)
        places = [TopicPartition(*place, offset) for place, offset in offsets.items()]
        producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), 30)
        producer.commit_transaction(30)
        copied += begun
    return copied
