"""The whole life of messages at a steady rate: how late they arrive, how often they rest, what they cost the broker."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from statistics import mean

import pika

from airflow_delay_provider.brokers.rabbitmq import wire
from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.message import Message
from benchmarks.databases import PAYLOAD_BYTES
from benchmarks.lateness import PERCENTILES
from benchmarks.measuring import Results, expect, percentile, say
from benchmarks.rabbitmq_node import Node
from benchmarks.rabbitmq_ways import BINARY, OFF, ON, STORE, Way, Ways

SLOW, FAST = 500, 2000
#: How often the producer publishes what has come together.
STEP_SECONDS = 0.01
#: Whole ticks, so that a hold that ends a moment too soon shows as an early message.
DELAY_SECONDS = (1, 20)
PREFETCH = 1000
ACK_EVERY = 100


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message as the consumer got it; all times in milliseconds since the epoch."""

    at: float
    deliver_at: int
    published_at: int
    rests: int


@dataclass(frozen=True, kw_only=True)
class Life:
    """What was found out about the messages of one run."""

    lateness_ms: list[float]
    hops: float
    cpu_us: float
    rate: float


def measure(
    node: Node, ways: Ways, results: Results, *, seconds: float, repeats: int, idle_share: float
) -> dict[str, list[float]]:
    """Run all ladders in turn at the slow rate and ours once at the fast one; return CPU times by way."""
    plan = [*repeats * [(OFF, SLOW), (ON, SLOW), (BINARY, SLOW)], (ON, FAST)]
    found: dict[tuple[str, int], list[Life]] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as consumer:
        consumer.submit(int).result()
        for name, rate in plan:
            say(f"deliver: {name}, {rate} messages/s for {seconds:g} s")
            life = _run(node, consumer, ways[name], rate=rate, seconds=seconds, idle_share=idle_share)
            found.setdefault((name, rate), []).append(life)
    for (name, rate), lives in found.items():
        _add_lateness(results, f"{name}, {rate}/s", lives)
    slow = {name: lives for (name, rate), lives in found.items() if rate == SLOW}
    cpu = {name: [life.cpu_us for life in lives] for name, lives in slow.items()}
    for name, values in cpu.items():
        base = {} if name == BINARY else {"ratio_to": f"whole life, {BINARY}", "base": cpu[BINARY]}
        results.add(STORE, f"whole life, {name}", values, "us/message", **base)
    for name, lives in slow.items():
        results.add(STORE, f"hops, {name}", [life.hops for life in lives], "hops/message")
    return cpu


def _add_lateness(results: Results, name: str, lives: Sequence[Life]) -> None:
    for label, share in PERCENTILES.items():
        results.add(STORE, f"{name}, {label}", [percentile(life.lateness_ms, share) for life in lives], "ms")
    results.add(STORE, f"{name}, achieved", [life.rate for life in lives], "published/s")
    results.samples[(STORE, name)] = [value for life in lives for value in life.lateness_ms]


def _run(node: Node, consumer: Executor, way: Way, *, rate: int, seconds: float, idle_share: float) -> Life:
    assert way.ladder is not None
    messages = int(rate * seconds)
    before, begin = node.cpu_seconds, time.monotonic()
    consuming = consumer.submit(_consume, node.url, way.channel, messages, seconds + DELAY_SECONDS[1] + 30)
    achieved = _produce(way, messages, rate)
    arrivals = consuming.result()
    used = node.cpu_seconds - before - idle_share * (time.monotonic() - begin)
    expect(f"messages that arrived, {way.name}", len(arrivals), messages)
    paths = [way.ladder.path(arrival.deliver_at - arrival.published_at) for arrival in arrivals]
    rests = sum(len(path) + way.relays for path in paths)
    expect(f"rests, {way.name}", sum(arrival.rests for arrival in arrivals), rests)
    if way.name != BINARY:
        expect("messages that were early", sum(arrival.at < arrival.deliver_at for arrival in arrivals), 0)
    return Life(
        lateness_ms=[a.at - (a.published_at + sum(path)) for a, path in zip(arrivals, paths, strict=True)],
        hops=mean(map(len, paths)),
        cpu_us=used / messages * 1e6,
        rate=achieved,
    )


def _produce(way: Way, messages: int, rate: int) -> float:
    """Publish at a steady rate and return the rate that was achieved."""
    delays = random.Random(1)
    begin, published = time.perf_counter(), 0
    while published < messages:
        wanted = min(messages, int((time.perf_counter() - begin) * rate) + 1)
        # Due times are whole milliseconds, rounded up: from any other moment a whole tick would become two.
        now = from_ms(floor_ms(datetime.now(UTC)))
        way.publish([_message(way.channel, now, delays.randint(*DELAY_SECONDS)) for _ in range(published, wanted)])
        published = wanted
        time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - begin) % STEP_SECONDS))
    return messages / (time.perf_counter() - begin)


def _message(channel: str, now: datetime, delay: int) -> Message:
    return Message(channel=channel, payload=os.urandom(PAYLOAD_BYTES), deliver_at=now + timedelta(seconds=delay))


def _consume(url: str, queue: str, messages: int, patience: float) -> list[Arrival]:
    """Take messages as they are pushed, in a process of its own."""
    arrivals: dict[str, Arrival] = {}
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)
        deadline = time.monotonic() + patience
        for method, properties, _ in channel.consume(queue, inactivity_timeout=1.0):
            if method is not None:
                arrivals[properties.message_id] = _arrival(properties)
                if len(arrivals) % ACK_EVERY == 0 or len(arrivals) == messages:
                    channel.basic_ack(method.delivery_tag, multiple=True)
            if len(arrivals) == messages or time.monotonic() > deadline:
                break
        channel.cancel()
    return list(arrivals.values())


def _arrival(properties: pika.BasicProperties) -> Arrival:
    now, headers = time.time() * 1000, properties.headers or {}
    rests = sum(death["count"] for death in headers["x-death"])
    return Arrival(now, headers[wire.DELIVER_AT], headers[wire.SCHEDULED_AT], rests)
