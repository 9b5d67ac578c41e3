"""How fast messages enter RabbitMQ, and the broker's CPU time for that, one way beside the other."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from airflow_delay_provider.domain.message import Message
from benchmarks.databases import PAYLOAD_BYTES
from benchmarks.measuring import Results, rate, say
from benchmarks.rabbitmq_node import Node
from benchmarks.rabbitmq_ways import KOMBU, RAW, STORE, Way, Ways

#: Messages a call; up to 1000 of them wait for their confirmation at a time.
BATCH = 5000
#: Long enough that nothing is delivered while others are published.
DELAY_SECONDS = (60, 3600)
SETTLE_SECONDS = 0.2
#: Messages each way before anything counts: the first ones on a new node take many times as long.
WARM_UP = 100


def measure(
    node: Node, ways: Ways, results: Results, *, messages: int, kombu_messages: int, repeats: int
) -> dict[str, list[float]]:
    """Publish with every way in turn, and return all rates by way."""
    for way in ways:
        _publish(node, way, WARM_UP)
        ways.empty(way, expected=WARM_UP)
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for repeat in range(repeats):
        say(f"publish: {messages} messages each way, repeat {repeat + 1}/{repeats}")
        for way in ways:
            n = kombu_messages if way.name == KOMBU else messages
            found, used = _publish(node, way, n)
            ways.empty(way, expected=n)
            rates.setdefault(way.name, []).append(found)
            cpu.setdefault(way.name, []).append(used)
    for name, values in rates.items():
        base = {} if name == RAW else {"ratio_to": RAW, "base": rates[RAW]}
        results.add(STORE, name, values, "messages/s", **base)
    for name, values in cpu.items():
        results.add(STORE, f"publish, {name}", values, "us/message")
    return rates


def _publish(node: Node, way: Way, n: int) -> tuple[float, float]:
    batches = _batches(way.channel, n)
    before = node.cpu_seconds
    found = rate(n, lambda: [way.publish(batch) for batch in batches])
    # What the broker still does for messages that it has confirmed.
    time.sleep(SETTLE_SECONDS)
    return found, (node.cpu_seconds - before) / n * 1e6


def _batches(channel: str, n: int) -> Sequence[list[Message]]:
    now, delays = datetime.now(UTC), random.Random(1)
    messages = [
        Message(
            channel=channel,
            payload=os.urandom(PAYLOAD_BYTES),
            deliver_at=now + timedelta(seconds=delays.randint(*DELAY_SECONDS)),
        )
        for _ in range(n)
    ]
    return [messages[start : start + BATCH] for start in range(0, n, BATCH)]
