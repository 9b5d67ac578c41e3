"""Measurements of RabbitMQ: publish rate, lateness and CPU time of the broker."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import pika

from airflow_delay_provider.brokers.rabbitmq import wire
from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.message import Message
from benchmarks.databases import PAYLOAD_BYTES
from benchmarks.lateness import PERCENTILES
from benchmarks.measurement import Results, ServerProcess, expect, percentile, rate, say
from benchmarks.rabbitmq_methods import BINARY, OFF, ON, ONE_BY_ONE, RAW, STORE, Method, Methods
from tests.ladder_path import path_of
from tests.rabbits import URL_VARIABLE
from tools.servers.rabbitmq import RabbitMQ


class Node(ServerProcess):
    """A node on this machine."""

    def __init__(self, url: str) -> None:
        super().__init__("RabbitMQ", pika.URLParameters(url).port, URL_VARIABLE)
        self.url = url

    def version(self) -> str:
        """Return the version of the server."""
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            found: str = connection._impl.server_properties["version"]
            return found


@contextmanager
def open_node(scratch: Path) -> Iterator[Node]:
    """Use the node given by the environment, or a private one."""
    if url := os.environ.get(URL_VARIABLE):
        yield Node(url)
        return
    server = RabbitMQ()
    try:
        server.start(scratch)
        yield Node(server.url)
    finally:
        server.stop()


#: Messages a call; up to 1000 of them wait for their confirmation at a time.
BATCH = 5000
#: Long enough that nothing is delivered while others are published.
PUBLISH_DELAY_SECONDS = (60, 3600)
SETTLE_SECONDS = 0.2
#: Messages of each method before anything counts: the first ones on a new node take many times as long.
WARM_UP = 100


def measure_rates(
    node: Node, methods: Methods, results: Results, *, messages: int, single_messages: int, repeats: int
) -> dict[str, list[float]]:
    """Publish with every method in turn, and return all rates by method."""
    for method in methods:
        _publish_all(node, method, WARM_UP)
        methods.empty(method, expected=WARM_UP)
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for repeat in range(repeats):
        say(f"publish: {messages} messages each, repeat {repeat + 1}/{repeats}")
        for method in methods:
            n = single_messages if method.name in ONE_BY_ONE else messages
            found, used = _publish_all(node, method, n)
            methods.empty(method, expected=n)
            rates.setdefault(method.name, []).append(found)
            cpu.setdefault(method.name, []).append(used)
    for name, values in rates.items():
        base = {} if name == RAW else {"ratio_to": RAW, "base": rates[RAW]}
        results.add(STORE, name, values, "messages/s", **base)
    for name, values in cpu.items():
        results.add(STORE, f"publish, {name}", values, "us/message")
    return rates


def _publish_all(node: Node, method: Method, n: int) -> tuple[float, float]:
    batches = _batches(method.channel, n)
    before = node.cpu_seconds
    found = rate(n, lambda: [method.publish(batch) for batch in batches])
    # Work of the broker for messages that it has already confirmed.
    time.sleep(SETTLE_SECONDS)
    return found, (node.cpu_seconds - before) / n * 1e6


def _batches(channel: str, n: int) -> Sequence[list[Message]]:
    now, delays = datetime.now(UTC), random.Random(1)
    messages = [
        Message(
            channel=channel,
            payload=os.urandom(PAYLOAD_BYTES),
            deliver_at=now + timedelta(seconds=delays.randint(*PUBLISH_DELAY_SECONDS)),
        )
        for _ in range(n)
    ]
    return [messages[start : start + BATCH] for start in range(0, n, BATCH)]


SLOW, FAST = 500, 2000
#: How often the producer publishes its collected messages.
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
    waits: int


@dataclass(frozen=True, kw_only=True)
class Life:
    """The measurements of one run."""

    lateness_ms: list[float]
    hops: float
    cpu_us: float
    rate: float


def measure_deliveries(
    node: Node, methods: Methods, results: Results, *, seconds: float, repeats: int, idle_share: float
) -> dict[str, list[float]]:
    """Run all ladders in turn at the slow rate and ours once at the fast one; return CPU times by method."""
    plan = [*repeats * [(OFF, SLOW), (ON, SLOW), (BINARY, SLOW)], (ON, FAST)]
    found: dict[tuple[str, int], list[Life]] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as consumer:
        consumer.submit(int).result()
        for name, rate in plan:
            say(f"deliver: {name}, {rate} messages/s for {seconds:g} s")
            life = _run(node, consumer, methods[name], rate=rate, seconds=seconds, idle_share=idle_share)
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


def _run(node: Node, consumer: Executor, method: Method, *, rate: int, seconds: float, idle_share: float) -> Life:
    assert method.ladder is not None
    messages = int(rate * seconds)
    before, begin = node.cpu_seconds, time.monotonic()
    consuming = consumer.submit(_consume, node.url, method.channel, messages, seconds + DELAY_SECONDS[1] + 30)
    achieved = _produce(method, messages, rate)
    arrivals = consuming.result()
    used = node.cpu_seconds - before - idle_share * (time.monotonic() - begin)
    expect(f"messages that arrived, {method.name}", len(arrivals), messages)
    paths = [path_of(method.ladder, arrival.deliver_at - arrival.published_at) for arrival in arrivals]
    waits = sum(len(path) + method.relays for path in paths)
    expect(f"waits, {method.name}", sum(arrival.waits for arrival in arrivals), waits)
    if method.name != BINARY:
        expect("messages that were early", sum(arrival.at < arrival.deliver_at for arrival in arrivals), 0)
    return Life(
        lateness_ms=[a.at - (a.published_at + sum(path)) for a, path in zip(arrivals, paths, strict=True)],
        hops=mean(map(len, paths)),
        cpu_us=used / messages * 1e6,
        rate=achieved,
    )


def _produce(method: Method, messages: int, rate: int) -> float:
    """Publish at a steady rate and return the rate that was achieved."""
    delays = random.Random(1)
    begin, published = time.perf_counter(), 0
    while published < messages:
        wanted = min(messages, int((time.perf_counter() - begin) * rate) + 1)
        # Due times are whole milliseconds, rounded up: from any other moment a whole tick would become two.
        now = from_ms(floor_ms(datetime.now(UTC)))
        method.publish(
            [_message(method.channel, now, delays.randint(*DELAY_SECONDS)) for _ in range(published, wanted)]
        )
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
    waits = sum(death["count"] for death in headers["x-death"])
    return Arrival(now, headers[wire.DELIVER_AT], headers[wire.SCHEDULED_AT], waits)
