"""How fast messages enter Kafka, beside plain records of the same payloads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from confluent_kafka import KafkaException, Producer

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.port import Outcome
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.domain.message import Message
from benchmarks.kafka_node import PAYLOAD_BYTES, STORE, Node, config_of, read_all
from benchmarks.measurement import Results, expect, rate, say

#: Messages of one call.
BATCH = 10_000
#: Long enough that a dispatcher would only move them; none runs.
DELAY_SECONDS = (60, 86_400)
OURS, COMPOSED = "schedule", "schedule, messages composed inside"
#: As safe as ours: confirmed by all replicas in sync, and each record once.
CONFIRMED = {"acks": "all", "enable.idempotence": True}
RAW, RAW_HEADERS = "raw produce", "raw produce with headers that schedule"
#: Key, value and partition of each record are those that we write.
RAW_SAME = "raw produce of the same bytes"
Batch = Sequence[tuple[bytes, datetime]]


def measure(
    node: Node, settings: Mapping[str, Any], results: Results, *, messages: int, repeats: int
) -> dict[str, list[float]]:
    """Publish in turn, and return the rates."""
    rates: dict[str, list[float]] = {}
    written = 0
    with node.topics(1) as (topic,), KafkaBroker(config_of(settings)) as broker:
        ways = _ways(node, broker, topic)
        for repeat in range(-1, repeats):
            say(
                f"schedule: {messages} messages, " + (f"repeat {repeat + 1}/{repeats}" if repeat >= 0 else "to warm up")
            )
            for name, prepare in ways.items():
                found = _run(prepare, messages if repeat >= 0 else min(messages, BATCH))
                if repeat >= 0:
                    rates.setdefault(name, []).append(found)
            written += messages if repeat >= 0 else min(messages, BATCH)
        # All ways but the plain one write there, and no other client does.
        wanted = (len(ways) - 1) * written
        expect("messages in the inbox", len(read_all(node.bootstrap, broker.topology.inbox, wanted)), wanted)
    for name, values in rates.items():
        base: dict[str, Any] = {} if name == RAW else {"ratio_to": RAW, "base": rates[RAW]}
        results.add(STORE, name, values, "messages/s", **base)
    return rates


def _ways(node: Node, broker: KafkaBroker, channel: str) -> dict[str, Callable[[Batch], Callable[[], object]]]:
    raw = RawProducer(node.bootstrap)

    def compose(batch: Batch) -> list[Message]:
        return [Message(channel=channel, payload=payload, deliver_at=due) for payload, due in batch]

    def schedule(messages: Sequence[Message]) -> None:
        receipts = broker.schedule(messages)
        expect("messages that wait", sum(each.outcome is Outcome.SCHEDULED for each in receipts), len(messages))

    def prepare_raw(batch: Batch) -> Callable[[], object]:
        payloads = [payload for payload, _ in batch]
        return lambda: raw.produce(channel, payloads)

    def prepare_headers(batch: Batch) -> Callable[[], object]:
        items = [(str(uuid4()), payload, ceil_ms(due)) for payload, due in batch]
        return lambda: raw.request(broker.topology.inbox, channel, items)

    def prepare_same(batch: Batch) -> Callable[[], object]:
        now_ms, topology = floor_ms(datetime.now(UTC)), broker.topology
        records = [
            (
                wire.encode_envelope(message, now_ms=now_ms),
                wire.encode_key(ceil_ms(message.deliver_at), message.id),
                topology.partition_of(message.key, message.id),
            )
            for message in compose(batch)
        ]
        return lambda: raw.copy(topology.inbox, records)

    def prepare_ours(batch: Batch) -> Callable[[], object]:
        messages = compose(batch)
        return lambda: schedule(messages)

    def prepare_composed(batch: Batch) -> Callable[[], object]:
        return lambda: schedule(compose(batch))

    return {
        RAW: prepare_raw,
        RAW_SAME: prepare_same,
        RAW_HEADERS: prepare_headers,
        OURS: prepare_ours,
        COMPOSED: prepare_composed,
    }


def _run(prepare: Callable[[Batch], Callable[[], object]], n: int) -> float:
    now, delays = datetime.now(UTC), random.Random(1)
    items = [(os.urandom(PAYLOAD_BYTES), now + timedelta(seconds=delays.randint(*DELAY_SECONDS))) for _ in range(n)]
    calls = [prepare(items[start : start + BATCH]) for start in range(0, n, BATCH)]
    return rate(n, lambda: [call() for call in calls])


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

    def copy(self, topic: str, records: Sequence[tuple[bytes, bytes, int]]) -> None:
        """Produce values, keys and partitions."""
        self._reported, produce, note = 0, self._producer.produce, self._note
        for value, key, partition in records:
            produce(topic, value, key, partition, note)
        self._producer.flush(60)
        expect("delivery reports", self._reported, len(records))

    def request(self, inbox: str, channel: str, items: Sequence[tuple[str, bytes, int]]) -> None:
        """Schedule by headers, like any Kafka producer: id, payload and due time."""
        self._reported, produce, note, where = 0, self._producer.produce, self._note, channel.encode()
        for message_id, payload, due_ms in items:
            headers = [
                (protocol.ID, message_id.encode()),
                (protocol.CHANNEL, where),
                (protocol.DELIVER_AT, b"%d" % due_ms),
            ]
            produce(inbox, payload, headers=headers, on_delivery=note)
        self._producer.flush(60)
        expect("delivery reports", self._reported, len(items))

    def _note(self, error: Any, _record: Any) -> None:
        if error is not None:
            raise KafkaException(error)
        self._reported += 1
