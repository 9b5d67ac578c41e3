"""How often a message is written until it is delivered: counted for each radix, and seen on a real broker.

The sender's own write is left out: it is one in every design. What is left are rests and the delivery. The entries of
the journal share records, one for each partition and transaction, and are left out too.

For comparison, the exponential buckets of nurkiewicz/kafka-scheduler are simulated, as its README describes them.

Bucket 0 holds what is due within a second, bucket k what is due in 2^(k-1) to 2^k seconds. A scanner looks at bucket k
every 2^(k-1) seconds, at bucket 0 every 100 ms ("quite frequently"), takes what it finds, and delivers it, or writes it
into the bucket for the time that is left, which may be the same. All scanners begin to count at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import mean
from typing import Any

from airflow_delay_provider.brokers.kafka.topology import COVER_MS, Topology
from airflow_delay_provider.domain.ladder import Ladder
from benchmarks.kafka_dispatch import Runner, wait_for_partitions
from benchmarks.kafka_leaps import rests_of, run_leaping_dispatcher
from benchmarks.kafka_node import STOP, Node, config_of, started
from benchmarks.measurement import Results, expect, say

DELAYS_MS = {"5 s": 5_000, "5 min": 300_000, "1 h": 3_600_000, "24 h": 86_400_000, "30 d": 30 * 86_400_000}
RADIXES = (2, 4, 8, 16)
BUCKETS = "buckets"
SPREAD = 1000


def count(results: Results) -> None:
    """Add the calculated writes: delays of half to one and a half times the one named."""
    for radix in RADIXES:
        topology, store = Topology(radix=radix), f"radix {radix}"
        for name, delay_ms in DELAYS_MS.items():
            writes = [len(rests_of(topology.ladder, each)) + 1 for each in _around(delay_ms)]
            _add(results, store, name, writes)
        _add_topics(results, store, len(topology.ladder.holds_ms), len(list(topology.topics())))
    random = Random(1)
    for name, delay_ms in DELAYS_MS.items():
        writes = [writes_of(each, random) for each in _around(delay_ms)]
        _add(results, BUCKETS, name, writes)
    buckets = bucket_count(COVER_MS)
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
    """Let messages pass all their rungs, and check that each is written as often as was counted."""
    runner = Runner(node, idle_seconds=0.1)
    for radix, settings in sorted(ladders.items()):
        say(f"writes: radix {radix}, {len(delays) * len(factors)} delays of {messages} messages")
        ladder = config_of(settings).topology.ladder
        with started(run_leaping_dispatcher, settings) as worker:
            wait_for_partitions([worker])
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


SCAN_ZERO_MS = 100
FIRST_MS = 1000
LONGEST_PERIOD_MS = FIRST_MS << 30


def bucket_of(remaining_ms: int) -> int:
    """Return the bucket for messages that are due after ``remaining_ms``."""
    return 0 if remaining_ms < FIRST_MS else math.frexp(remaining_ms / FIRST_MS)[1]


def bucket_count(cover_ms: int) -> int:
    """Return how many buckets there must be."""
    return bucket_of(cover_ms) + 1


def writes_of(delay_ms: int, random: Random) -> int:
    """Return how often scanners write a message, its delivery among them; the sender's own write is not."""
    sent_at = at = random.randrange(LONGEST_PERIOD_MS)
    due, writes = sent_at + delay_ms, 0
    while at < due:
        bucket = bucket_of(due - at)
        every = SCAN_ZERO_MS if bucket == 0 else FIRST_MS << (bucket - 1)
        at = (at // every + 1) * every
        writes += 1
    return writes
