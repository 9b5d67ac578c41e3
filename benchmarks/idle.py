"""``./dev bench idle``: what a dispatcher costs that has nothing to do, or one message a second.

Expected first: on PostgreSQL it looks for due messages when it is notified and once a second, beside a heartbeat and
the loops that keep house: about four transactions a second. On SQLite it reads one number every 20 ms.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta

import psutil

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.message import Message
from benchmarks.databases import Database, run_on_databases
from benchmarks.ledger_checks import dispatch_times
from benchmarks.measurement import MismatchError, Results, expect, percentile, say
from benchmarks.processes import dispatchers

#: The first runs of all loops are over.
SETTLE_SECONDS = 4.0
DELAY = timedelta(milliseconds=500)


def measure(database: Database, results: Results, *, seconds: int) -> None:
    """Let one dispatcher be idle, then give it one message a second."""
    with database.fresh() as url, dispatchers(url):
        time.sleep(SETTLE_SECONDS)
        [dispatcher] = [child for child in psutil.Process().children() if "dispatcher" in " ".join(child.cmdline())]
        say(f"{database.name}: idle for {seconds} s")
        _observe(database, url, dispatcher, results, "idle", lambda: time.sleep(seconds), seconds)
        say(f"{database.name}: one message a second for {seconds} s")
        with EmbeddedBroker(Ledger(url)) as broker:
            _observe(
                database, url, dispatcher, results, "one a second", lambda: _schedule_slowly(broker, seconds), seconds
            )
        time.sleep(1.0)
        lateness = [float(dispatched - due) for due, dispatched in dispatch_times(url)]
        expect("messages that were dispatched", len(lateness), seconds)
        expect("messages that were early", sum(late < 0 for late in lateness), 0)
        for label, share in (("p50", 0.5), ("max", 1.0)):
            results.add(database.name, f"lateness, {label}", [percentile(lateness, share)], "ms")


def _observe(
    database: Database,
    url: str,
    dispatcher: psutil.Process,
    results: Results,
    name: str,
    work: Callable[[], object],
    seconds: int,
) -> None:
    transactions, cpu = _transactions(database, url), _cpu_seconds(dispatcher)
    work()
    used = _cpu_seconds(dispatcher) - cpu
    results.add(database.name, f"{name}: processor", [100 * used / seconds], "% of a core")
    if database.name == "postgresql":
        # Statistics of the server are written when a session has nothing else to do, at most once a second.
        time.sleep(1.0)
        made = _transactions(database, url) - transactions
        results.add(database.name, f"{name}: transactions", [made / (seconds + 1)], "a second")


def _schedule_slowly(broker: EmbeddedBroker, n: int) -> None:
    for _ in range(n):
        broker.schedule([Message(channel="idle", payload=b"", deliver_at=datetime.now(UTC) + DELAY)])
        time.sleep(1.0)


def _transactions(database: Database, url: str) -> int:
    if database.name != "postgresql":
        return 0
    with closing(database.connect(url)) as connection:
        query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        return int(connection.execute(query).fetchone()[0])


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 when a message was early or missing."""
    parser = argparse.ArgumentParser(prog="./dev bench idle", description="Measure an idle dispatcher.")
    parser.add_argument("--seconds", type=int, default=15, help="how long each state is observed")
    options = parser.parse_args(arguments)

    def run(databases: object) -> Results:
        results = Results()
        for database in databases:  # type: ignore[attr-defined]
            measure(database, results, seconds=options.seconds)
        return results

    try:
        found, _ = run_on_databases(run)
    except MismatchError as mismatch:
        print(f"error: {mismatch}", file=sys.stderr)
        return 1
    for each in found.measurements:
        print(f"{each.store:<11} {each.name:<28} {each.value:8.2f} {each.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
