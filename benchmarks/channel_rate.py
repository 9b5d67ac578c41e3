"""How fast consumers receive and requeue messages, and how fast the journal is read. For information."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.clock import floor_ms
from benchmarks.databases import Database, Rows
from benchmarks.ledger_checks import expect_ledger
from benchmarks.measurement import Results, expect, rate, say

CHANNEL = "bench.0"
PREFETCH = 100
JOURNAL_SECONDS = 120.0


def measure(databases: Sequence[Database], results: Results, *, messages: int, requeued: int, repeats: int) -> None:
    """Requeue some messages of a full channel, take the others, and read the whole journal."""
    for database in databases:
        found: dict[str, list[float]] = {}
        with database.fresh() as template:
            _fill_channel(database, template, messages)
            for repeat in range(repeats):
                say(f"channels and journal on {database.name}: {messages} messages, repeat {repeat + 1}/{repeats}")
                for name, value in _run(database, template, messages, requeued).items():
                    found.setdefault(name, []).append(value)
        for name, values in found.items():
            results.add(database.name, name, values, "entries/s" if name == "read journal" else "messages/s")


def _fill_channel(database: Database, url: str, messages: int) -> None:
    database.load(url, Rows(total=messages, first_due_ms=int(time.time() * 1000) - 3_600_000))
    with EmbeddedBroker(Ledger(url)) as broker:
        now_ms = floor_ms(broker.clock.now())
        moved = broker.ledger.transact(lambda c: len(delivery.deliver_due(c, now_ms=now_ms, limit=messages)))
    expect("messages in the channel", moved, messages)
    database.analyze(url)


def _run(database: Database, template: str, messages: int, requeued: int) -> dict[str, float]:
    with database.fresh(template) as url:
        with EmbeddedBroker(Ledger(url)) as broker:
            broker.check()
            read = rate(2 * messages, lambda: _read_journal(broker, 2 * messages))
            put_back = rate(requeued, lambda: _requeue(broker, requeued))
            taken = rate(messages - requeued, lambda: _receive_all(broker, messages - requeued))
        expect_ledger(
            url,
            scheduled=requeued,
            dispatched=messages - requeued,
            in_channels=0,
            events=2 * messages + requeued,
        )
    return {"read journal": read, "requeue one by one": put_back, "receive and acknowledge by 100": taken}


def _read_journal(broker: EmbeddedBroker, entries: int) -> None:
    # Any transaction on the server, such as an automatic ANALYZE, holds the tail back until it ends.
    deadline = time.monotonic() + JOURNAL_SECONDS
    position, found = "0:0", 0
    while found < entries and time.monotonic() < deadline:
        if some := broker.read_journal(after=position):
            position, found = some[-1].position, found + len(some)
    expect("journal entries", found, entries)


def _requeue(broker: EmbeddedBroker, messages: int) -> None:
    for item in broker.receive(CHANNEL, limit=messages):
        broker.requeue(item, timedelta(hours=1))


def _receive_all(broker: EmbeddedBroker, messages: int) -> None:
    taken = 0
    while deliveries := broker.receive(CHANNEL, limit=PREFETCH):
        broker.ack(deliveries)
        taken += len(deliveries)
    expect("messages received", taken, messages)
