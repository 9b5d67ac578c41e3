"""How late messages are at a steady rate: by their record's timestamp, and as a reader of committed records sees it.

A run that is not counted comes first: the broker has just begun, deletes what was measured before, and still compiles.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.domain.message import Message
from benchmarks.kafka_node import PAYLOAD_BYTES, STORE, Node, config_of
from benchmarks.kafka_processes import STOP, Usage, dispatch, started
from benchmarks.kafka_reading import Seen, watch
from benchmarks.measuring import Results, expect, percentile, say

RATES = (1000, 5000)
#: How often the producer schedules what has come together.
STEP_SECONDS = 0.02
PERCENTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
SEEN, WRITTEN = "seen by a consumer", "by the record's timestamp"


def measure(
    node: Node, settings: Mapping[str, Any], results: Results, *, seconds: float, delays: tuple[float, float]
) -> None:
    """Schedule, dispatch and consume at once, each in a process of its own."""
    say("lateness: warming up")
    _run(node, settings, int(RATES[-1] * seconds / 3), RATES[-1], delays)
    for rate in RATES:
        say(f"lateness: {rate} messages/s for {seconds:g} s")
        messages = int(rate * seconds)
        seen, achieved, shares = _run(node, settings, messages, rate, delays)
        lateness = {
            SEEN: [each.seen_at - each.deliver_at for each in seen],
            WRITTEN: [float(each.written_at - each.deliver_at) for each in seen],
        }
        expect("messages that were early", sum(late < 0 for late in [*lateness[SEEN], *lateness[WRITTEN]]), 0)
        for name, values in lateness.items():
            for label, part in PERCENTILES.items():
                results.add(STORE, f"{rate}/s, {name}, {label}", [percentile(values, part)], "ms")
            results.samples[(STORE, f"{rate}/s, {name}")] = values
        results.add(STORE, f"{rate}/s, achieved", [achieved], "scheduled/s")
        for who, share in shares.items():
            results.add(STORE, f"{rate}/s, CPU of the {who}", [share * 100], "% of a core")


def _run(
    node: Node, settings: Mapping[str, Any], messages: int, rate: int, delays: tuple[float, float]
) -> tuple[Sequence[Seen], float, Mapping[str, float]]:
    patience = messages / rate + delays[1] + 60
    with (
        node.topics(1) as (channel,),
        started(dispatch, settings) as dispatcher,
        started(watch, node.bootstrap, channel, messages, patience) as watcher,
        KafkaBroker(config_of(settings)) as broker,
    ):
        broker.check_channels([channel])
        dispatcher.hear()
        watcher.hear()
        before: Usage = dispatcher.ask("usage")
        broker_before, begin = node.cpu_seconds, time.monotonic()
        achieved = _produce(broker, channel, messages, rate, delays)
        seen: list[Seen] = watcher.hear(patience)
        used: Usage = dispatcher.ask("usage")
        took, broker_used = time.monotonic() - begin, node.cpu_seconds - broker_before
        dispatcher.ask(STOP)
    expect("messages that arrived once", len({each.message_id for each in seen}), messages)
    shares = {"dispatcher": (used.cpu_seconds - before.cpu_seconds) / took, "broker": broker_used / took}
    return seen, achieved, shares


def _produce(broker: KafkaBroker, channel: str, messages: int, rate: int, delays: tuple[float, float]) -> float:
    """Schedule at a steady rate and return the rate that was achieved."""
    chance = random.Random(1)
    begin, scheduled = time.perf_counter(), 0
    while scheduled < messages:
        wanted = min(messages, int((time.perf_counter() - begin) * rate) + 1)
        now = datetime.now(UTC)
        broker.schedule([_message(channel, now, chance.uniform(*delays)) for _ in range(scheduled, wanted)])
        scheduled = wanted
        time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - begin) % STEP_SECONDS))
    return messages / (time.perf_counter() - begin)


def _message(channel: str, now: datetime, delay: float) -> Message:
    return Message(channel=channel, payload=os.urandom(PAYLOAD_BYTES), deliver_at=now + timedelta(seconds=delay))
