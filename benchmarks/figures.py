"""What figures cost: folding them from the journal, reading them, and the indexes by origin while scheduling.

Expected: folding a page is four statements and one commit, whatever the size of the ledger. Reading a series or the due
counts touches at most intervals x (changes + lateness buckets) rows: it grows until each interval has seen all of them,
and no more. Each index by origin is one more index entry for each message that a task schedules.

Usage: python -m benchmarks.figures [--sizes 1000 1000000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from statistics import median

from sqlalchemy import Connection, text

from airflow_delay_provider.brokers.ledger import fold, statistics
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.statistics import Window
from airflow_delay_provider.domain.message import Message, Origin
from benchmarks.databases import PAYLOAD_BYTES, Database, Rows, run_on_databases
from benchmarks.measurement import Results, expect, rate, say

PAGE = 1000
TIMED_PAGES = 50
DAY_MS = 86_400_000
CALLS = 20
SCHEDULED = 20_000
BATCH = 1000
ORIGIN_INDEXES = ("ix_delay_scheduled_message_dag", "ix_delay_scheduled_message_run")

Look = Callable[[Connection], object]


def measure_reads(databases: Sequence[Database], results: Results, *, sizes: Sequence[int], repeats: int) -> None:
    """Fold ledgers of these sizes, and time reading their figures in turns."""
    now_ms = int(time.time() * 1000)
    for database in databases:
        urls = {size: database.create() for size in sizes}
        ledgers = {size: Ledger(url) for size, url in urls.items()}
        for size, url in urls.items():
            say(f"{database.name}: loading and folding {size} messages")
            _load(database, url, size, now_ms)
            pages = _fold_all(ledgers[size])
            results.add(database.name, f"fold {PAGE} entries, ledger of {size:,}", pages, "ms")
            database.analyze(url)
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(repeats):
            for name, look in _looks(now_ms).items():
                for size, ledger in ledgers.items():
                    found.setdefault((name, size), []).append(_milliseconds(ledger, look))
        for name in _looks(now_ms):
            for size in sizes:
                base = found[(name, sizes[0])] if size != sizes[0] else ()
                to = f"{name} at {sizes[0]:,}" if base else ""
                results.add(database.name, f"{name} at {size:,}", found[(name, size)], "ms", ratio_to=to, base=base)
        for size, ledger in ledgers.items():
            ledger.close()
            database.drop(urls[size])


def measure_indexes(databases: Sequence[Database], results: Results, *, repeats: int) -> None:
    """Schedule messages of tasks with and without the indexes by origin, in turns."""
    for database in databases:
        rates: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(repeats):
            say(f"{database.name}: schedule {SCHEDULED} messages of tasks, repeat {repeat + 1}/{repeats}")
            for indexed in (True, False):
                rates[indexed].append(_schedule_rate(database, indexed=indexed))
        base = "schedule without the indexes by origin"
        results.add(database.name, "schedule with both", rates[True], "messages/s", ratio_to=base, base=rates[False])
        results.add(database.name, base, rates[False], "messages/s")


def _load(database: Database, url: str, size: int, now_ms: int) -> None:
    """Messages due from 2 days ago to 30 days ahead; those of the past are dispatched, up to 5 s late."""
    step_ms = max(1, 32 * DAY_MS // size)
    rows = Rows(total=size, dispatched=size // 16, first_due_ms=now_ms - 2 * DAY_MS, step_ms=step_ms)
    database.load(url, rows)
    with closing(Ledger(url)) as ledger:
        statements = [
            "UPDATE delay_event SET at_ms = deliver_at_ms - 3600000",
            "INSERT INTO delay_event (xid, message_seq, message_id, channel, change, at_ms, deliver_at_ms)"
            " SELECT xid, message_seq, message_id, delay_event.channel, 'dispatched',"
            " delay_event.deliver_at_ms + (message_seq * 7919) % 5000, delay_event.deliver_at_ms"
            " FROM delay_event JOIN delay_scheduled_message AS m ON m.seq = message_seq WHERE m.state = 101",
        ]
        ledger.transact(lambda c: [c.execute(text(each)) for each in statements])


def _fold_all(ledger: Ledger) -> list[float]:
    """Fold everything, and return the milliseconds of the first pages."""
    pages: list[float] = []
    while len(pages) < TIMED_PAGES:
        begin = time.perf_counter()
        if ledger.transact(fold.fold, PAGE) < PAGE:
            return pages
        pages.append((time.perf_counter() - begin) * 1000)
    while ledger.transact(fold.fold, 50 * PAGE):
        pass
    return pages


def _looks(now_ms: int) -> dict[str, Look]:
    def series(window: Window) -> Look:
        return lambda c: statistics.series(c, now_ms=now_ms, window=window)

    def upcoming(window: Window) -> Look:
        return lambda c: statistics.upcoming(c, now_ms=now_ms, window=window)

    return {
        **{f"series of the last {window.value}": series(window) for window in Window},
        **{f"upcoming {window.value}": upcoming(window) for window in Window},
    }


def _milliseconds(ledger: Ledger, look: Look) -> float:
    times = []
    with ledger.read() as connection:
        for _ in range(CALLS):
            begin = time.perf_counter()
            look(connection)
            times.append((time.perf_counter() - begin) * 1000)
    return median(times)


def _schedule_rate(database: Database, *, indexed: bool) -> float:
    first_due = datetime.now(UTC) + timedelta(days=1)
    messages = [
        Message(
            channel="bench.0",
            payload=os.urandom(PAYLOAD_BYTES),
            deliver_at=first_due + timedelta(milliseconds=number),
            origin=Origin(dag_id=f"dag_{number % 10}", run_id=f"run_{number % 100}", task_id="send"),
        )
        for number in range(SCHEDULED)
    ]
    batches = [messages[start : start + BATCH] for start in range(0, SCHEDULED, BATCH)]
    with database.fresh() as url, EmbeddedBroker(Ledger(url)) as broker:
        if not indexed:
            broker.ledger.transact(lambda c: [c.execute(text(f"DROP INDEX {name}")) for name in ORIGIN_INDEXES])
        broker.check()
        found = rate(SCHEDULED, lambda: [broker.schedule(batch) for batch in batches])
        with broker.ledger.read() as connection:
            stored = connection.execute(text("SELECT count(*) FROM delay_scheduled_message")).scalar()
        expect("stored messages", stored, SCHEDULED)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()

    def run(databases: Sequence[Database]) -> Results:
        results = Results()
        measure_indexes(databases, results, repeats=given.repeats)
        measure_reads(databases, results, sizes=given.sizes, repeats=given.repeats)
        return results

    results, _ = run_on_databases(run)
    for each in results.measurements:
        ratio = "" if each.ratio is None else f"  x{each.ratio:.2f} of {each.ratio_to}"
        spread = f"({each.min:.2f} .. {each.max:.2f}, n={each.repeats})"
        print(f"{each.store:10}  {each.name:45}  {each.value:10.2f} {each.unit}  {spread}{ratio}")


if __name__ == "__main__":
    main()
