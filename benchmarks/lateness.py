"""How late messages are at a steady rate: by the ledger's own marks, and as a consumer sees it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.message import Message
from benchmarks.databases import PAYLOAD_BYTES, Database
from benchmarks.ledger_checks import dispatch_times, expect_ledger
from benchmarks.measurement import Results, expect, percentile, say
from benchmarks.processes import dispatchers

RATE = 1000
#: How often the producer schedules its collected messages.
TICK_SECONDS = 0.01
DELAY_SECONDS = (0.5, 4.0)
CHANNEL = "bench.0"
PREFETCH = 100
IDLE_SECONDS = 0.005
PERCENTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
BY_LEDGER = "lateness by the ledger"
BY_CONSUMER = "lateness at a consumer"


def measure(databases: Sequence[Database], results: Results, *, seconds: float, repeats: int) -> None:
    """Schedule, dispatch and consume at once, each in a process of its own."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    achieved: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for database in databases:
            say(f"lateness on {database.name}: {RATE} messages/s for {seconds} s, repeat {repeat + 1}/{repeats}")
            by_ledger, by_consumer, rate = _run(database, seconds)
            found.setdefault((database.name, BY_LEDGER), []).append(by_ledger)
            found.setdefault((database.name, BY_CONSUMER), []).append(by_consumer)
            achieved.setdefault(database.name, []).append(rate)
    for database in databases:
        results.add(database.name, "steady scheduling", achieved[database.name], "messages/s")
    for (database_name, name), runs in found.items():
        for label, share in PERCENTILES.items():
            results.add(database_name, f"{name}, {label}", [percentile(run, share) for run in runs], "ms")
        results.samples[(database_name, name)] = [value for run in runs for value in run]


def _run(database: Database, seconds: float) -> tuple[list[float], list[float], float]:
    messages = int(RATE * seconds)
    with (
        database.fresh() as url,
        dispatchers(url),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as consumer,
    ):
        consumer.submit(int).result()
        patience = seconds + DELAY_SECONDS[1] + 120
        consuming = consumer.submit(_consume, url, messages, patience)
        rate = _produce(url, messages)
        by_consumer = consuming.result()
        times = dispatch_times(url)
        expect("messages received", len(by_consumer), messages)
        expect_ledger(url, scheduled=0, dispatched=messages, in_channels=0, events=2 * messages)
        by_ledger = [float(dispatched - due) for due, dispatched in times]
        expect("messages that were early", sum(late < 0 for late in by_ledger + by_consumer), 0)
    return by_ledger, by_consumer, rate


def _produce(url: str, messages: int) -> float:
    """Schedule at a steady rate and return the rate that was achieved."""
    delays = random.Random(1)
    begin, scheduled = time.perf_counter(), 0
    with EmbeddedBroker(Ledger(url)) as broker:
        while scheduled < messages:
            wanted = min(messages, int((time.perf_counter() - begin) * RATE) + 1)
            now = datetime.now(UTC)
            broker.schedule([_message(now, delays.uniform(*DELAY_SECONDS)) for _ in range(scheduled, wanted)])
            scheduled = wanted
            time.sleep(max(0.0, TICK_SECONDS - (time.perf_counter() - begin) % TICK_SECONDS))
        return messages / (time.perf_counter() - begin)


def _message(now: datetime, delay: float) -> Message:
    return Message(channel=CHANNEL, payload=os.urandom(PAYLOAD_BYTES), deliver_at=now + timedelta(seconds=delay))


def _consume(url: str, messages: int, patience: float) -> list[float]:
    """Receive and acknowledge until all messages came, and return how late each was, in milliseconds."""
    late: list[float] = []
    deadline = time.monotonic() + patience
    with EmbeddedBroker(Ledger(url)) as broker:
        while len(late) < messages and time.monotonic() < deadline:
            deliveries = broker.receive(CHANNEL, limit=PREFETCH)
            now = time.time()
            late += [(now - delivery.message.deliver_at.timestamp()) * 1000 for delivery in deliveries]
            if deliveries:
                broker.ack(deliveries)
            else:
                time.sleep(IDLE_SECONDS)
    return late
