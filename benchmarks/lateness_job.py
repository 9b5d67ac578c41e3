"""The lateness job on a large journal: a first run over one day, and a second run that reads only the next day.

Expected: both runs cost about the same, as a run reads the entries of its own day once, writes them, and reads them
some times more from Parquet. One core of Python turns some 100 000 rows a second into Arrow, so reading takes most of
the time and scales with the cores. Memory hardly grows with the rows: a task holds one page of rows, and Spark spills
what it sorts.

Usage: ./dev bench lateness_job [--rows 20000000] [--cores 2] [--memory 2g] [--quick]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark

from airflow_delay_provider.spark.jobs import lateness
from benchmarks import results as result_files
from benchmarks.databases import URL_VARIABLE, Postgres
from benchmarks.measurement import MismatchError, Results, expect, say
from tools.servers.spark import HOME, client_environment

ROWS, QUICK_ROWS = 20_000_000, 100_000
CHANNELS = 20
DAY_MS = 86_400_000
#: Midnight of the first day, recent enough for the ledger to keep its entries.
FIRST_DAY_MS = (int(time.time() * 1000) // DAY_MS - 3) * DAY_MS
_CONNECTION = "bench"
_READ = re.compile(r"([\d,]+) new entries of \d+ days in ([\d.]+) s")
_COMPUTED = re.compile(r"figures of .* in ([\d.]+) s")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured, and with what."""

    rows: int
    cores: int
    memory: str


@dataclass(frozen=True, kw_only=True)
class JobRun:
    """What one run of the job took."""

    seconds: float
    read_seconds: float
    figure_seconds: float
    entries: int
    peak_mib: float


def measure(database: Postgres, results: Results, sizes: Sizes, scratch: Path) -> None:
    """Fill a journal day by day, and run the job after each."""
    url = database.create()
    file = scratch / "connections.json"
    file.write_text(json.dumps({_CONNECTION: {"conn_type": "delay", "extra": {"ledger_url": url}}}))
    try:
        for day, name in enumerate(("first day", "second, incremental day")):
            say(f"loading {sizes.rows // 2:,} rows of day {day + 1}")
            _load_day(database, url, day, sizes.rows // 2)
            say(f"running the job with {sizes.cores} cores and a driver of {sizes.memory}")
            run = _run_job(file, scratch / "out", sizes)
            expect(f"entries of the {name}", run.entries, sizes.rows // 2)
            results.add("postgresql", f"{name}: whole job", [run.seconds], "s")
            results.add("postgresql", f"{name}: journal to Parquet", [run.read_seconds], "s")
            results.add("postgresql", f"{name}: figures", [run.figure_seconds], "s")
            results.add("postgresql", f"{name}: journal to Parquet, rate", [run.entries / run.read_seconds], "rows/s")
            results.add("postgresql", f"{name}: whole job, rate", [run.entries / run.seconds], "rows/s")
            results.add("postgresql", f"{name}: peak memory of all processes", [run.peak_mib], "MiB")
        _check_figures(scratch / "out", sizes.rows)
    finally:
        database.drop(url)


def _load_day(database: Postgres, url: str, day: int, rows: int) -> None:
    """Add messages that are due evenly over one day, scheduled a second before, and dispatched up to 8 s late."""
    messages = rows // 2
    first_ms = FIRST_DAY_MS + day * DAY_MS + 1000
    due = f"{first_ms} + i * {DAY_MS - 20_000}::bigint / {messages}"
    late = "CASE WHEN i % 1000 = 0 THEN 8000 ELSE (i::bigint * 7919) % 997 END"
    source = f"generate_series(0, {messages - 1}) AS g(i)"
    columns = "(xid, message_seq, message_id, channel, change, at_ms, deliver_at_ms)"
    with closing(database.connect(url)) as connection:
        for change, at in (("scheduled", f"{due} - 1000"), ("dispatched", f"{due} + {late}")):
            connection.execute(
                f"INSERT INTO delay_event {columns} SELECT pg_current_xact_id()::text::bigint, i, md5('{day}.' || i),"
                f" 'channel.' || i % {CHANNELS}, '{change}', {at}, {due} FROM {source}"
            )
            connection.commit()
    database.analyze(url)


def _run_job(connection_file: Path, output: Path, sizes: Sizes) -> JobRun:
    command = [str(HOME / "bin" / "spark-submit"), "--master", f"local[{sizes.cores}]"]
    command += ["--driver-memory", sizes.memory, "--conf", "spark.ui.showConsoleProgress=false", lateness.__file__]
    command += ["--connection", _CONNECTION, "--connection-file", str(connection_file), "--output", str(output)]
    expect("file of connections", connection_file.is_file(), True)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **client_environment(), "PYSPARK_PYTHON": sys.executable},
        )
        peak = PeakMemory(process.pid)
        peak.start()
        code = process.wait()
        seconds = time.monotonic() - began
        peak.stop()
        log.seek(0)
        text = log.read()
    read, figures = _READ.search(text), _COMPUTED.search(text)
    if code != 0 or read is None or figures is None:
        raise MismatchError(f"the job ended with {code}:\n{text[-4000:]}")
    return JobRun(
        seconds=seconds,
        read_seconds=float(read[2]),
        figure_seconds=float(figures[1]),
        entries=int(read[1].replace(",", "")),
        peak_mib=peak.bytes / 2**20,
    )


def _check_figures(output: Path, rows: int) -> None:
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(output / "hourly", format="parquet", partitioning="hive").to_table()
    figures = table.select(["scheduled", "dispatched", "duplicates", "early"]).to_pandas().sum()
    expect("counted messages", figures.tolist(), [rows // 2, rows // 2, 0, 0])


class PeakMemory(threading.Thread):
    """The most memory that a process and its children had at once; shared pages count in each of them."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._root = psutil.Process(pid)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            self.bytes = max(self.bytes, self._now())

    def stop(self) -> None:
        """Return when no more is measured."""
        self._ended.set()
        self.join()

    def _now(self) -> int:
        total = 0
        with suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
        return total


def main(argv: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    """Measure, and write the results."""
    options = result_files.parser("lateness_job", "The lateness job on a large journal of a PostgreSQL ledger.")
    options.add_argument("--rows", type=int, help=f"entries of both days; default: {ROWS:,}, quick: {QUICK_ROWS:,}")
    options.add_argument("--cores", type=int, default=2, help="default: 2")
    options.add_argument("--memory", default="2g", help="memory of the JVM; default: 2g")
    given = options.parse_args(argv)
    rows = given.rows or (QUICK_ROWS if given.quick else ROWS)
    # Both days have as many scheduled entries as dispatched ones.
    sizes = sizes or Sizes(rows=rows // 4 * 4, cores=given.cores, memory=given.memory)
    folder = given.results or (result_files.QUICK_FOLDER if given.quick else result_files.FOLDER)
    database = Postgres(os.environ[URL_VARIABLE])
    results, load_at_begin = Results(), os.getloadavg()[0]
    try:
        with tempfile.TemporaryDirectory(prefix="delay-bench-") as scratch:
            measure(database, results, sizes, Path(scratch))
    except MismatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result_files.write_csv(folder / "lateness_job.csv", results.measurements)
    software = {"postgresql": database.version(), "spark": pyspark.__version__}
    software |= {"rows": f"{sizes.rows:,}", "job_cores": str(sizes.cores), "driver_memory": sizes.memory}
    machine = folder / "lateness_job_machine.json"
    result_files.write_machine(machine, software, quick=given.quick, load_at_begin=load_at_begin)
    result_files.print_table(f"lateness job, {sizes.rows:,} journal entries", results.measurements)
    return 0


if __name__ == "__main__":
    sys.exit(main())
