"""The cost of a query of the ledger, and whether it stays the same when the ledger grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

from sqlalchemy import Connection

from airflow_delay_provider.brokers.ledger import delivery, listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.lifecycle import State
from benchmarks.databases import Database, Rows
from benchmarks.measurement import Results, expect, say

CHANNELS = 10
CANCELLED_EVERY = 1000
CHANNEL = "bench.3"

Look = Callable[[Connection], object]


def measure(
    databases: Sequence[Database], results: Results, *, sizes: tuple[int, int], calls: int, repeats: int
) -> None:
    """Time every query on a small and on a large ledger, interleaved."""
    for database in databases:
        with ExitStack() as stack:
            ledgers = {size: _loaded(database, size, stack) for size in sizes}
            found: dict[tuple[str, int], list[float]] = {}
            looks = {size: _looks(ledger, size) for size, ledger in ledgers.items()}
            for repeat in range(repeats):
                say(f"lookups on {database.name}: repeat {repeat + 1}/{repeats}")
                for name in looks[sizes[0]]:
                    for size, ledger in ledgers.items():
                        found.setdefault((name, size), []).append(_microseconds(ledger, looks[size][name], calls))
        small, large = sizes
        for name in looks[small]:
            base = label(name, small)
            results.add(database.name, base, found[(name, small)], "us")
            results.add(
                database.name,
                label(name, large),
                found[(name, large)],
                "us",
                ratio_to=base,
                base=found[(name, small)],
            )


def label(name: str, size: int) -> str:
    """Return the name of a measurement at one size."""
    return f"{name} at {size:,} rows"


def _loaded(database: Database, size: int, stack: ExitStack) -> Ledger:
    say(f"lookups on {database.name}: loading {size} rows")
    url = stack.enter_context(database.fresh())
    dispatched = size * 9 // 10
    first_due_ms = int(time.time() * 1000) - dispatched * 100
    database.load(
        url,
        Rows(
            total=size,
            dispatched=dispatched,
            cancelled_every=CANCELLED_EVERY,
            channels=CHANNELS,
            first_due_ms=first_due_ms,
            step_ms=100,
            journal=False,
        ),
    )
    database.analyze(url)
    ledger = Ledger(url)
    stack.callback(ledger.close)
    return ledger


def _looks(ledger: Ledger, size: int) -> dict[str, Look]:
    with ledger.read() as connection:
        expect("rows", sum(listing.count_by_state(connection).values()), size)
        # Cancelled messages lie evenly among all: a page with half of them ends in the middle.
        half_of_cancelled = max(1, size // CANCELLED_EVERY // 2)
        middle = listing.page(connection, states=[State.CANCELLED], size=half_of_cancelled).next
        expect("a token of the middle", middle is not None, True)
        waiting = listing.page(connection, channel=CHANNEL, states=[State.SCHEDULED], size=100)
        expect("a page of a channel and state", {(r.message.channel, r.state) for r in waiting.records}, {_WAITING})
    return {
        "first page": lambda c: listing.page(c),
        "page in the middle": lambda c: listing.page(c, token=middle),
        "first page of a channel and state": lambda c: listing.page(c, channel=CHANNEL, states=[State.SCHEDULED]),
        "page in the middle of a channel and state": lambda c: listing.page(
            c, channel=CHANNEL, states=[State.DISPATCHED], token=middle
        ),
        "counts by state": lambda c: listing.count_by_state(c),
        "counts by channel": lambda c: listing.count_by_channel(c),
        "next due": lambda c: delivery.next_due_ms(c),
        "next due of a channel": lambda c: listing.next_scheduled_at(c, channel=CHANNEL),
    }


_WAITING = (CHANNEL, State.SCHEDULED)


def _microseconds(ledger: Ledger, look: Look, calls: int) -> float:
    """Return the median of some calls, each in a transaction of its own as every caller has it."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        with ledger.read() as connection:
            look(connection)
        times.append(time.perf_counter() - begin)
    return median(times) * 1e6
