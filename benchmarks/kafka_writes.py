"""How often a message is written until it is delivered: counted for each radix, and seen on a real broker.

The sender's own write is left out: it is one in every design. What is left are rests and the delivery. The entries of
the journal share records, one for each lane and transaction, and are left out too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from statistics import mean
from typing import Any

from airflow_delay_provider.brokers.kafka.topology import COVER_MS, Topology
from airflow_delay_provider.domain.ladder import Ladder
from benchmarks import kafka_buckets
from benchmarks.kafka_leaps import climb, rests_of
from benchmarks.kafka_node import Node, config_of
from benchmarks.kafka_processes import STOP, started
from benchmarks.kafka_runs import Runner, wait_for_lanes
from benchmarks.measuring import Results, expect, say

DELAYS_MS = {"5 s": 5_000, "5 min": 300_000, "1 h": 3_600_000, "24 h": 86_400_000, "30 d": 30 * 86_400_000}
RADIXES = (2, 4, 8, 16)
BUCKETS = "buckets"
SPREAD = 1000


def count(results: Results) -> None:
    """Add what follows from arithmetic: delays of half to one and a half times the one named."""
    for radix in RADIXES:
        topology, store = Topology(radix=radix), f"radix {radix}"
        for name, delay_ms in DELAYS_MS.items():
            writes = [len(rests_of(topology.ladder, each)) + 1 for each in _around(delay_ms)]
            _add(results, store, name, writes)
        _add_topics(results, store, len(topology.ladder.holds_ms), len(list(topology.topics())))
    random = Random(1)
    for name, delay_ms in DELAYS_MS.items():
        writes = [kafka_buckets.writes_of(each, random) for each in _around(delay_ms)]
        _add(results, BUCKETS, name, writes)
    buckets = kafka_buckets.bucket_count(COVER_MS)
    _add_topics(results, BUCKETS, buckets, buckets)


def measure(
    node: Node,
    ladders: Mapping[int, Mapping[str, Any]],
    results: Results,
    *,
    messages: int,
    delays: Sequence[str],
    factors: Sequence[float],
) -> None:
    """Let messages pass all their rests, and see that each is written as often as was counted."""
    runner = Runner(node, idle_seconds=0.1)
    for radix, settings in sorted(ladders.items()):
        say(f"writes: radix {radix}, {len(delays) * len(factors)} delays of {messages} messages")
        ladder = config_of(settings).topology.ladder
        with started(climb, settings) as worker:
            wait_for_lanes([worker])
            for name in delays:
                found = []
                for factor in factors:
                    each_ms = round(DELAYS_MS[name] * factor)
                    run = runner.travel(settings, [worker], messages, delay_ms=each_ms)
                    expect(f"writes of a message, radix {radix}, {each_ms} ms", run.writes, _writes(ladder, each_ms))
                    found.append(run.writes)
                results.add(f"radix {radix}", f"writes measured, {name}", found, "writes/message")
            worker.tell(STOP)


def _writes(ladder: Ladder, delay_ms: int) -> int:
    return len(rests_of(ladder, delay_ms)) + 1


def _around(delay_ms: int) -> list[int]:
    return [round(delay_ms * (0.5 + step / SPREAD)) for step in range(SPREAD + 1)]


def _add(results: Results, store: str, name: str, writes: Sequence[float]) -> None:
    results.add(store, f"writes counted, {name}", [mean(writes)], "writes/message")
    results.add(store, f"writes counted, {name}, most", [max(writes)], "writes/message")


def _add_topics(results: Results, store: str, rungs: int, topics: int) -> None:
    results.add(store, "rungs", [rungs], "topics")
    results.add(store, "topics", [topics], "topics")
