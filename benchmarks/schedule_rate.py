"""How fast messages enter the ledger, beside bare inserts of the same rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.message import Message
from benchmarks.bare import inserts_of, open_bare, rows_of
from benchmarks.databases import PAYLOAD_BYTES, Database
from benchmarks.ledger_checks import expect_ledger
from benchmarks.measurement import Results, expect, rate, say

BATCH = 1000
LEDGER = "schedule"


def measure(databases: Sequence[Database], results: Results, *, messages: int, singles: int, repeats: int) -> None:
    """Schedule in batches and one by one, each beside bare inserts."""
    for label, n, batch in (("in batches of 1000", messages, BATCH), ("one by one", singles, 1)):
        rates: dict[tuple[str, str], list[float]] = {}
        for repeat in range(repeats):
            say(f"schedule {label}: {n} messages, repeat {repeat + 1}/{repeats}")
            for database in databases:
                rates.setdefault((database.name, LEDGER), []).append(_ledger_rate(database, n, batch))
                for way in inserts_of(database.name):
                    rates.setdefault((database.name, way), []).append(_bare_rate(database, n, batch, way))
        for (name, way), values in rates.items():
            results.add(name, f"{way} {label}", values, "messages/s")
            if way != LEDGER:
                shares = [mine / its for mine, its in zip(rates[name, LEDGER], values, strict=True)]
                results.add(name, f"rate: {LEDGER} / {way}, {label}", shares, "times")


def _ledger_rate(database: Database, n: int, batch: int) -> float:
    batches = _batches(n, batch)
    with database.fresh() as url:
        with EmbeddedBroker(Ledger(url)) as broker:
            broker.check()
            found = rate(n, lambda: [broker.schedule(messages) for messages in batches])
        expect_ledger(url, scheduled=n, dispatched=0, in_channels=0, events=n)
    return found


def _bare_rate(database: Database, n: int, batch: int, way: str) -> float:
    batches = [rows_of(messages, now_ms=0) for messages in _batches(n, batch)]
    with database.fresh() as url, closing(open_bare(database.name, database.connect(url))) as bare:
        insert = inserts_of(database.name)[way]
        found = rate(n, lambda: [insert(bare, columns, rows) for columns, rows in batches])
        expect("rows of the bare insert", bare.count_messages(), n)
    return found


def _batches(n: int, size: int) -> list[list[Message]]:
    first_due = datetime.now(UTC) + timedelta(days=1)
    messages = [
        Message(
            channel="bench.0",
            payload=os.urandom(PAYLOAD_BYTES),
            deliver_at=first_due + timedelta(milliseconds=number),
        )
        for number in range(n)
    ]
    return [messages[start : start + size] for start in range(0, n, size)]
