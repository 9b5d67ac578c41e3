"""``./dev bench ledger``: rates, lateness and flatness of the ledger on SQLite and PostgreSQL.

Expected first, counted in the code (docs/performance.md): scheduling a message writes 2 rows and 8 index entries,
dispatching it 3 rows and 9, claiming it ahead of time 1 row and 6 more. The number of statements does not depend on the
size of a batch: one by one is ruled by the statements and the commit, in batches by the rows. A look reads one stretch
of one index for each state, or the few rows of counts, so it does not grow with the ledger.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks import channel_rate, dispatch_rate, lateness, lookups, plots, results, schedule_rate
from benchmarks.databases import Database, run_on_databases
from benchmarks.measurement import MismatchError, Results, say


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    schedule_messages: int = 20_000
    schedule_singles: int = 300
    dispatch_messages: int = 30_000
    channel_messages: int = 10_000
    requeued: int = 300
    repeats: int = 5
    lateness_seconds: float = 12.0
    lateness_repeats: int = 2
    lookup_sizes: tuple[int, int] = (10_000, 1_000_000)
    lookup_calls: int = 60


QUICK = Sizes(
    schedule_messages=3_000,
    schedule_singles=50,
    dispatch_messages=2_000,
    channel_messages=1_000,
    requeued=50,
    repeats=1,
    lateness_seconds=1.0,
    lateness_repeats=1,
    lookup_sizes=(10_000, 50_000),
    lookup_calls=10,
)


def run(databases: Sequence[Database], sizes: Sizes) -> Results:
    """Measure everything; raises ``MismatchError`` when a count is wrong."""
    found = Results()
    schedule_rate.measure(
        databases, found, messages=sizes.schedule_messages, singles=sizes.schedule_singles, repeats=sizes.repeats
    )
    dispatch_rate.measure(databases, found, messages=sizes.dispatch_messages, repeats=sizes.repeats)
    channel_rate.measure(
        databases, found, messages=sizes.channel_messages, requeued=sizes.requeued, repeats=sizes.repeats
    )
    lateness.measure(databases, found, seconds=sizes.lateness_seconds, repeats=sizes.lateness_repeats)
    lookups.measure(databases, found, sizes=sizes.lookup_sizes, calls=sizes.lookup_calls, repeats=max(3, sizes.repeats))
    found.measurements.sort(key=lambda m: [database.name for database in databases].index(m.store))
    return found


def main(arguments: list[str] | None = None, *, sizes: Sizes | None = None) -> int:
    """Measure, print, write CSV and pictures; 1 when something was not dispatched or counted right."""
    options = results.parser("ledger", "Measure the ledger.").parse_args(arguments)
    sizes = sizes or (QUICK if options.quick else Sizes())
    folder = options.results or (results.QUICK_FOLDER if options.quick else results.FOLDER)
    begin, load_at_begin = time.monotonic(), os.getloadavg()[0]
    try:
        found, versions = run_on_databases(lambda databases: run(databases, sizes))
    except MismatchError as mismatch:
        print(f"error: {mismatch}", file=sys.stderr)
        return 1
    results.write_csv(folder / "ledger.csv", found.measurements)
    software = versions | {
        "sqlalchemy": version("sqlalchemy"),
        "psycopg": version("psycopg"),
    }
    results.write_machine(folder / "ledger_machine.json", software, quick=options.quick, load_at_begin=load_at_begin)
    plots.draw_all(found, folder)
    results.print_table("Ledger benchmark", found.measurements)
    say(f"all counts were right; {time.monotonic() - begin:.0f} s; results in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
