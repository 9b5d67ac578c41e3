"""``./dev bench pipeline``: a Parquet file scheduled by Spark, beside the hook and a bare loop of the client library.

Expected first (docs/performance.md). The hook makes a message of each row and encodes it, in one process of Python:
about 12 us a row on Kafka with the reading of the file, and more for the rows of a ledger. The data source does the
same in a process of each core and gets whole columns from Spark, so one core should reach the rate of the hook. Two
cores cannot be twice as fast here: broker, JVM and workers share them. The JVM sink makes no object of Python.
Reading a row takes about 1.3 us, its checks and headers 0.5 us as compiled code, and handing it to the producer with
its headers about 4 us, so two cores should reach 3 to 4 times the rate of the hook once the JVM has compiled it; a
row of the first 100 000 costs three times as much. Tasks keep one batch in memory, so memory does not depend on the
number of rows; the JVM may take all of the heap that it was given.
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
from benchmarks.pipeline_report import HOOK, LIVE, Rates, memory_name, way_name
from benchmarks.pipeline_rows import messages_of, read_batches, write_rows
from benchmarks.pipeline_spark import Run, SparkProcess, Way, running_spark, watching
from benchmarks.pipeline_stores import Place, Store, open_stores

CONN_ID = "bench"
Work = Callable[[Place, Path], Run]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    rows: int = 1_000_000
    #: Of each variant before anything counts: until the JVM has compiled what it runs, a row costs several times more.
    warm_up_rows: int = 100_000
    repeats: int = 1
    cores: tuple[int, ...] = (1, 2)
    memory_rows: tuple[int, ...] = (100_000, 1_000_000)


QUICK = Sizes(rows=20_000, warm_up_rows=2_000, memory_rows=(5_000, 20_000))


def run(stores: Sequence[Store], sizes: Sizes, scratch: Path) -> Results:
    """Measure everything; raises when a count is wrong."""
    found = Results()
    _measure_rates(stores, sizes, scratch, found)
    _measure_memory(stores, sizes, scratch, found)
    return found


def _measure_rates(stores: Sequence[Store], sizes: Sizes, scratch: Path, found: Results) -> None:
    parquet = write_rows(scratch / "rows.parquet", sizes.rows)
    few_rows = min(sizes.warm_up_rows, sizes.rows)
    few = write_rows(scratch / "few.parquet", few_rows)
    rates: Rates = {}
    cpu: Rates = {}
    with ExitStack() as stack:
        sparks = {cores: stack.enter_context(running_spark(cores, scratch)) for cores in sizes.cores}
        for store in stores:
            for name, work in _variants(store, sparks, scratch).items():
                _timed(store, f"{name}, to warm up", work, few, few_rows)
        for _ in range(sizes.repeats):
            for store in stores:
                for name, work in _variants(store, sparks, scratch).items():
                    run = _timed(store, name, work, parquet, sizes.rows)
                    rates.setdefault((store.name, name), []).append(sizes.rows / run.seconds)
                    if run.cpu_seconds is not None:
                        cpu.setdefault((store.name, name), []).append(run.cpu_seconds / sizes.rows * 1e6)
    pipeline_report.add_rates(found, rates)
    pipeline_report.add_cpu(found, cpu)


def _variants(store: Store, sparks: dict[int, SparkProcess], scratch: Path) -> dict[str, Work]:
    variants: dict[str, Work] = {store.bare: _schedule_bare, HOOK: _schedule_by_hook}
    for cores, spark in sparks.items():
        for way in _ways(store):
            variants[way_name(way, cores)] = _spark_variant(spark, way, scratch)
    return variants


def _ways(store: Store) -> list[Way]:
    return ["data source", "JVM sink"] if store.has_sink else ["data source"]


def _spark_variant(spark: SparkProcess, way: Way, scratch: Path, *, watch_heap: bool = False) -> Work:
    def write(place: Place, parquet: Path) -> Run:
        file = scratch / "connection.json"
        file.write_text(json.dumps({CONN_ID: place.connection}))
        return spark.write(way, parquet, connection_file=file, channel=place.channel, watch_heap=watch_heap)

    return write


def _schedule_bare(place: Place, parquet: Path) -> Run:
    return Run(seconds=place.schedule_bare(parquet))


def _schedule_by_hook(place: Place, parquet: Path) -> Run:
    from airflow_delay_provider.hooks.delay import DelayHook

    with patch.dict(os.environ, {f"AIRFLOW_CONN_{CONN_ID.upper()}": json.dumps(place.connection)}):
        hook = DelayHook(CONN_ID)
        hook.get_conn().check()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for batch in read_batches(parquet):
            hook.schedule(messages_of(batch, place.channel))
        run = Run(seconds=time.perf_counter() - begin, cpu_seconds=time.process_time() - cpu_begin)
        hook.close()
    return run


def _timed(store: Store, name: str, work: Work, parquet: Path, rows: int) -> Run:
    with store.fresh() as place:
        run = work(place, parquet)
        expect(f"{store.name}: messages that wait, {name}", place.count(), rows)
    say(f"{store.name}: {name}: {rows / run.seconds:,.0f} rows/s, load {os.getloadavg()[0]:.1f}")
    return run


def _measure_memory(stores: Sequence[Store], sizes: Sizes, scratch: Path, found: Results) -> None:
    """Each in processes of its own: memory is not given back."""
    cores = max(sizes.cores)
    for store in stores:
        for way in _ways(store):
            for rows in sizes.memory_rows:
                parquet = write_rows(scratch / "memory.parquet", rows)
                with running_spark(cores, scratch) as spark, watching(spark.tree) as peak:
                    _timed(store, f"memory of {way}", _spark_variant(spark, way, scratch), parquet, rows)
                with running_spark(cores, scratch) as spark:
                    write = _spark_variant(spark, way, scratch, watch_heap=True)
                    live = _timed(store, f"heap of {way}", write, parquet, rows).live_mib
                if live is not None:
                    found.add(store.name, memory_name(way, rows, LIVE), [live], "MiB")
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
    # Airflow would log each migration of a fresh ledger.
    os.environ.setdefault("AIRFLOW__LOGGING__LOGGING_LEVEL", "WARNING")
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
