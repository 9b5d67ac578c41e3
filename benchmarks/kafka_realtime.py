"""A dispatcher in real time: how late messages are, what it costs while idle, how soon it serves.

Lateness is measured by the timestamps of records, and by a consumer of committed records. A run that is not counted
comes first: the broker has just started, deletes the topics of earlier measurements, and still compiles.
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
from benchmarks.kafka_node import (
    PAYLOAD_BYTES,
    STOP,
    STORE,
    Node,
    Seen,
    Usage,
    Worker,
    config_of,
    run_dispatcher,
    started,
    watch,
)
from benchmarks.measurement import Results, expect, percentile, say

RATES = (1000, 5000)
#: How often the producer schedules its collected messages.
STEP_SECONDS = 0.02
PERCENTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
SEEN, WRITTEN = "seen by a consumer", "by the record's timestamp"


def measure_lateness(
    node: Node, settings: Mapping[str, Any], results: Results, *, seconds: float, delays: tuple[float, float]
) -> None:
    """Schedule, dispatch and consume at once, each in a process of its own."""
    say("lateness: warming up")
    _run_steadily(node, settings, int(RATES[-1] * seconds / 3), RATES[-1], delays)
    for rate in RATES:
        say(f"lateness: {rate} messages/s for {seconds:g} s")
        messages = int(rate * seconds)
        seen, achieved, shares = _run_steadily(node, settings, messages, rate, delays)
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


def _run_steadily(
    node: Node, settings: Mapping[str, Any], messages: int, rate: int, delays: tuple[float, float]
) -> tuple[Sequence[Seen], float, Mapping[str, float]]:
    patience = messages / rate + delays[1] + 60
    with (
        node.topics(1) as (channel,),
        started(run_dispatcher, settings) as dispatcher,
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


SETTLE_SECONDS = 1.0


def measure_idle(
    node: Node, ladders: Mapping[int, Mapping[str, Any]], results: Results, *, seconds: float, repeats: int
) -> None:
    """Measure one ladder after the other while its dispatcher is idle."""
    found: dict[tuple[int, str], list[float]] = {}
    for repeat in range(repeats):
        say(f"idle: a dispatcher on each ladder for {seconds:g} s, repeat {repeat + 1}/{repeats}")
        alone = node.idle_share(seconds / 2)
        for radix, settings in ladders.items():
            with started(run_dispatcher, settings) as dispatcher:
                dispatcher.hear()
                time.sleep(SETTLE_SECONDS)
                before = dispatcher.ask("usage").cpu_seconds
                broker = node.idle_share(seconds) - alone
                used = dispatcher.ask(STOP).cpu_seconds - before
            found.setdefault((radix, "dispatcher"), []).append(used / seconds * 100)
            found.setdefault((radix, "broker"), []).append(max(0.0, broker) * 100)
    for (radix, who), values in found.items():
        results.add(f"radix {radix}", f"idle, CPU of the {who}", values, "% of a core")


BATCH = 10_000
#: Of the waiting messages: none moves while dispatchers start, and all long rungs have some.
WAIT_SECONDS = (7_200, 30 * 86_400)
#: Of the message that is waited for.
FRESH_SECONDS = 1.0
#: How long the broker may take until nothing is left in the inbox.
MOVE_SECONDS = 300.0
UNITS = {"serves its partitions after": "s", "delivers a message of 1 s after": "s", "peak memory": "MB"}


def measure_restart(node: Node, empty: Mapping[str, Any], results: Results, *, pending: int, repeats: int) -> None:
    """Start dispatchers on an empty ladder and on a full one in turn."""
    with node.topics(1) as (channel,), node.ladder(4) as full:
        say(f"restart: {pending} messages begin to wait")
        _fill(full, channel, pending)
        found: dict[tuple[int, str], list[float]] = {}
        for repeat in range(repeats):
            say(f"restart: 0 and {pending} messages wait, repeat {repeat + 1}/{repeats}")
            for n, settings in ((0, empty), (pending, full)):
                for name, value in zip(UNITS, _restart(node, settings), strict=True):
                    found.setdefault((n, name), []).append(value)
    for (n, name), values in found.items():
        base: dict[str, Any] = {"ratio_to": _name(0, name), "base": found[0, name]} if n else {}
        results.add(STORE, _name(n, name), values, UNITS[name], **base)


#: Below the default limit of a payload.
LARGE_BYTES = 900_000
OVERDUE_SECONDS = (0.5, 2.0)


def measure_large(node: Node, results: Results, *, messages: int) -> None:
    """Start a dispatcher where large messages wait for long, and where they are overdue, and see its memory."""
    what = f"{messages:,} of {LARGE_BYTES // 1000} kB"
    say(f"restart: {what} wait")
    with node.topics(1) as (channel,), node.ladder(4) as settings:
        _fill(settings, channel, messages, size=LARGE_BYTES)
        *_, peak = _restart(node, settings)
    results.add(STORE, f"restart, {what} wait: peak memory", [peak], "MB")
    say(f"restart: {what} are overdue")
    with node.topics(1) as (channel,), node.ladder(4) as settings:
        _schedule(settings, channel, messages, OVERDUE_SECONDS, size=LARGE_BYTES)
        time.sleep(OVERDUE_SECONDS[1])
        with (
            started(watch, node.bootstrap, channel, messages, MOVE_SECONDS) as watcher,
            started(run_dispatcher, settings) as dispatcher,
        ):
            dispatcher.hear()
            watcher.hear()
            seen: list[Seen] = watcher.hear(MOVE_SECONDS)
            used: Usage = dispatcher.ask(STOP)
    expect("large messages that arrived once", len({each.message_id for each in seen}), messages)
    results.add(STORE, f"restart, {what} are overdue: peak memory", [used.peak_rss_mb], "MB")


def _name(pending: int, what: str) -> str:
    return f"restart, {pending:,} wait: {what}"


def _fill(settings: Mapping[str, Any], channel: str, pending: int, *, size: int = PAYLOAD_BYTES) -> None:
    """Schedule messages, and let a dispatcher put them all into the rungs in which they wait."""
    with started(run_dispatcher, settings) as dispatcher:
        _schedule(settings, channel, pending, WAIT_SECONDS, size=size)
        dispatcher.hear()
        _wait_until_still(dispatcher)
        dispatcher.ask(STOP)


def _schedule(
    settings: Mapping[str, Any], channel: str, messages: int, delays: tuple[float, float], *, size: int
) -> None:
    chance, left = random.Random(1), messages
    most = max(10, BATCH * PAYLOAD_BYTES // size)
    with KafkaBroker(config_of(settings)) as broker:
        while left:
            now, n = datetime.now(UTC), min(most, left)
            broker.schedule([_message(channel, now, chance.uniform(*delays), size=size) for _ in range(n)])
            left -= n


def _wait_until_still(dispatcher: Worker) -> None:
    """Return when the dispatcher is nearly idle."""
    deadline, before = time.monotonic() + MOVE_SECONDS, dispatcher.ask("usage").cpu_seconds
    while True:
        time.sleep(2.0)
        now = dispatcher.ask("usage").cpu_seconds
        if now - before < 0.3:
            return
        expect("messages are in their rungs in time", time.monotonic() < deadline, True)
        before = now


def _restart(node: Node, settings: Mapping[str, Any]) -> tuple[float, float, float]:
    with (
        node.topics(1) as (channel,),
        started(watch, node.bootstrap, channel, 1, 60.0) as watcher,
        KafkaBroker(config_of(settings)) as broker,
    ):
        broker.check_channels([channel])
        watcher.hear()
        with started(run_dispatcher, settings) as dispatcher:
            begin, at = time.monotonic(), time.time()
            broker.schedule([_message(channel, datetime.now(UTC), FRESH_SECONDS)])
            serves = dispatcher.hear() - begin
            seen: list[Seen] = watcher.hear()
            used: Usage = dispatcher.ask(STOP)
    return serves, seen[0].seen_at / 1000 - at, used.peak_rss_mb


def _message(channel: str, now: datetime, delay: float, *, size: int = PAYLOAD_BYTES) -> Message:
    return Message(channel=channel, payload=os.urandom(size), deliver_at=now + timedelta(seconds=delay))
