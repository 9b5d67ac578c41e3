"""``./dev bench pipeline``: a Parquet file scheduled by Spark, beside the hook and a bare loop of the client library.

Expected first, counted in the code. The hook makes a message of each row and encodes it, in one process of Python: some
8 us a row on Kafka, and as much again for the rows of a ledger. The data source does the same in each core's own
process, and gets rows as Arrow columns for about 1 us (docs/performance.md), so one core should reach the rate of the
hook, and two cores 1.7 times that while the broker keeps up: with the servers, the JVM and two workers on 2 cores there
is not that much processor to share. The JVM sink makes no object of Python. A row is a dozen compiled expressions and a
record of about 300 bytes, of which headers are half, so it should reach several times the rate of the hook, and the
producer and the broker share the processor. Tasks keep one batch in memory, so memory does not depend on the number of
rows; the JVM may take all of the heap that it was given.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from benchmarks import pipeline_report, results
from benchmarks.measurement import MismatchError, Results, expect, say
from benchmarks.pipeline_report import HOOK, Rates, memory_name, way_name
from benchmarks.pipeline_rows import messages_of, read_batches, write_rows
from benchmarks.pipeline_spark import SparkProcess, Way, running_spark, watching
from benchmarks.pipeline_stores import Place, Store, open_stores

CONN_ID = "bench"
WARM_UP_ROWS = 2_000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    rows: int = 1_000_000
    repeats: int = 1
    cores: tuple[int, ...] = (1, 2)
    memory_rows: tuple[int, ...] = (100_000, 1_000_000)


QUICK = Sizes(rows=20_000, memory_rows=(5_000, 20_000))


def run(stores: Sequence[Store], sizes: Sizes, scratch: Path) -> Results:
    """Measure everything; raises when a count is wrong."""
    found = Results()
    _measure_rates(stores, sizes, scratch, found)
    _measure_memory(stores, sizes, scratch, found)
    return found


def _measure_rates(stores: Sequence[Store], sizes: Sizes, scratch: Path, found: Results) -> None:
    parquet = write_rows(scratch / "rows.parquet", sizes.rows)
    few = write_rows(scratch / "few.parquet", min(WARM_UP_ROWS, sizes.rows))
    rates: Rates = {}
    with ExitStack() as stack:
        sparks = {cores: stack.enter_context(running_spark(cores, scratch)) for cores in sizes.cores}
        for store in stores:
            for name, work in _variants(store, sparks, scratch).items():
                _timed(store, f"{name}, to warm up", work, few, min(WARM_UP_ROWS, sizes.rows))
        for _ in range(sizes.repeats):
            for store in stores:
                for name, work in _variants(store, sparks, scratch).items():
                    seconds = _timed(store, name, work, parquet, sizes.rows)
                    rates.setdefault((store.name, name), []).append(sizes.rows / seconds)
    pipeline_report.add_rates(found, rates)


def _variants(
    store: Store, sparks: dict[int, SparkProcess], scratch: Path
) -> dict[str, Callable[[Place, Path], float]]:
    variants: dict[str, Callable[[Place, Path], float]] = {store.bare: _schedule_bare, HOOK: _schedule_by_hook}
    for cores, spark in sparks.items():
        for way in _ways(store):
            variants[way_name(way, cores)] = _spark_variant(spark, way, scratch)
    return variants


def _ways(store: Store) -> list[Way]:
    return ["data source", "JVM sink"] if store.has_sink else ["data source"]


def _spark_variant(spark: SparkProcess, way: Way, scratch: Path) -> Callable[[Place, Path], float]:
    def write(place: Place, parquet: Path) -> float:
        file = scratch / "connection.json"
        file.write_text(json.dumps({CONN_ID: place.connection}))
        return spark.write(way, parquet, connection_file=file, channel=place.channel)

    return write


def _schedule_bare(place: Place, parquet: Path) -> float:
    return place.schedule_bare(parquet)


def _schedule_by_hook(place: Place, parquet: Path) -> float:
    from airflow_delay_provider.hooks.delay import DelayHook

    with patch.dict(os.environ, {f"AIRFLOW_CONN_{CONN_ID.upper()}": json.dumps(place.connection)}):
        hook = DelayHook(CONN_ID)
        hook.get_conn().check()
        begin = time.perf_counter()
        for batch in read_batches(parquet):
            hook.schedule(messages_of(batch, place.channel))
        seconds = time.perf_counter() - begin
        hook.close()
    return seconds


def _timed(store: Store, name: str, work: Callable[[Place, Path], float], parquet: Path, rows: int) -> float:
    with store.fresh() as place:
        seconds = work(place, parquet)
        expect(f"{store.name}: messages that wait, {name}", place.count(), rows)
    say(f"{store.name}: {name}: {rows / seconds:,.0f} rows/s, load {os.getloadavg()[0]:.1f}")
    return seconds


def _measure_memory(stores: Sequence[Store], sizes: Sizes, scratch: Path, found: Results) -> None:
    """Each in processes of its own: memory is not given back."""
    cores = max(sizes.cores)
    for store in stores:
        for way in _ways(store):
            for rows in sizes.memory_rows:
                parquet = write_rows(scratch / "memory.parquet", rows)
                with running_spark(cores, scratch) as spark, watching(spark.tree) as peak:
                    _timed(store, f"memory of {way}", _spark_variant(spark, way, scratch), parquet, rows)
                found.add(store.name, memory_name(way, rows, "JVM"), [peak.jvm_mib], "MiB")
                found.add(store.name, memory_name(way, rows, "Python"), [peak.python_mib], "MiB")
    pipeline_report.add_growth(found, sizes.memory_rows)


def main(arguments: list[str] | None = None, *, sizes: Sizes | None = None) -> int:
    """Measure, print, write CSV and a picture; 1 when messages are missing or too many."""
    parser = results.parser("pipeline", "Measure how Spark schedules a DataFrame.")
    parser.add_argument("--rows", type=int, help="rows of each run")
    parser.add_argument("--memory-rows", type=int, nargs="*", help="rows of the runs whose memory is measured")
    parser.add_argument("--repeats", type=int, help="runs of each variant, in turn")
    options = parser.parse_args(arguments)
    sizes = sizes or (QUICK if options.quick else Sizes())
    given = {"rows": options.rows, "repeats": options.repeats}
    sizes = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    if options.memory_rows is not None:
        sizes = replace(sizes, memory_rows=tuple(options.memory_rows))
    folder = options.results or (results.QUICK_FOLDER if options.quick else results.FOLDER)
    begin, load_at_begin = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="delay-bench-") as scratch, open_stores() as stores:
        try:
            found = run(stores, sizes, Path(scratch))
        except MismatchError as mismatch:
            print(f"error: {mismatch}", file=sys.stderr)
            return 1
    results.write_csv(folder / "pipeline.csv", found.measurements)
    software = {"rows": sizes.rows} | {
        name: version(name) for name in ("pyspark", "pyarrow", "confluent-kafka", "pika")
    }
    results.write_machine(folder / "pipeline_machine.json", software, quick=options.quick, load_at_begin=load_at_begin)
    pipeline_report.draw(found, folder)
    results.print_table("Pipeline benchmark", found.measurements)
    print(pipeline_report.aims_table(found.measurements))
    say(f"all messages were counted; {time.monotonic() - begin:.0f} s; results in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
