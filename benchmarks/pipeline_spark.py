"""Spark in a process of its own, which writes a Parquet file on request, and the memory of that process's tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from benchmarks.measurement import MismatchError
from tools.servers.spark import client_environment, find_kafka_connector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Way = Literal["data source", "JVM sink"]
DRIVER_MEMORY = "1g"
_SAMPLE_SECONDS = 0.2
_COLLECT_SECONDS = 0.1
_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run took; the processor time is that of the clients, without the broker's."""

    seconds: float
    cpu_seconds: float | None = None
    #: The most that the heap of the JVM held after a collection; None if it was not watched.
    live_mib: float | None = None


class SparkProcess:
    """A local Spark with a number of cores. A process of Python drives it, and its own drive the data source."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def tree(self) -> psutil.Process:
        """The process that began all others."""
        return psutil.Process(self._process.pid)

    def write(self, way: Way, parquet: Path, *, connection_file: Path, channel: str, watch_heap: bool = False) -> Run:
        """Write a file; watching the heap takes time."""
        assert self._process.stdin is not None
        request = {
            "way": way,
            "parquet": str(parquet),
            "connection": str(connection_file),
            "channel": channel,
            "watch_heap": watch_heap,
        }
        begin = self._cpu_seconds()
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        heard = self._hear()
        cpu_seconds = self._cpu_seconds() - begin
        return Run(seconds=heard["seconds"], cpu_seconds=cpu_seconds, live_mib=heard["live_mib"])

    def _cpu_seconds(self) -> float:
        """Return what the JVM and all workers have used; workers are used again."""
        times = [each.cpu_times() for each in (self.tree, *self.tree.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # Spark's own process writes there, too.
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise MismatchError(f"Spark ended with {self._process.wait(60)}:\n{self._log.read_text()[-5000:]}")


@contextmanager
def running_spark(cores: int, scratch: Path) -> Iterator[SparkProcess]:
    """Yield a Spark that is ready."""
    log = scratch / f"spark-{time.monotonic_ns()}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pipeline_spark", str(cores), str(scratch)],
            env={**os.environ, **client_environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        # Leaving it closes the standard input, with which it ends.
        with process:
            spark = SparkProcess(process, log)
            spark._hear()
            yield spark


@dataclass
class PeakMemory:
    """The most memory that parts of a process tree had at a time: shared pages count in parts."""

    jvm_mib: float = 0.0
    python_mib: float = 0.0

    def add(self, root: psutil.Process) -> None:
        """Look once."""
        parts = {True: 0, False: 0}
        with suppress(psutil.NoSuchProcess):
            for process in root.children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    parts[process.name() == "java"] += process.memory_full_info().pss
        self.jvm_mib = max(self.jvm_mib, parts[True] / _MEBIBYTE)
        self.python_mib = max(self.python_mib, parts[False] / _MEBIBYTE)


@contextmanager
def watching(root: psutil.Process) -> Iterator[PeakMemory]:
    """Look at the children of a process again and again: the JVM, and the workers in Python."""
    peak = PeakMemory()
    try:
        with _repeating(lambda: peak.add(root), seconds=_SAMPLE_SECONDS):
            yield peak
    finally:
        peak.add(root)


@contextmanager
def _repeating(look: Callable[[], None], *, seconds: float) -> Iterator[None]:
    """Call ``look`` again and again beside the body."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            look()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# -- in the process ------------------------------------------------------------------------------------------------


def main(cores: str, scratch: str) -> None:
    """Write the files that are asked for on the standard input."""
    from pyspark.sql import SparkSession

    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.jars": ",".join(map(str, find_kafka_connector())),
        "spark.local.dir": scratch,
        "spark.sql.files.maxPartitionBytes": "8m",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("benchmark")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.perf_counter()
        with watching_heap(spark) if request["watch_heap"] else nullcontext() as heap:
            write(spark.read.parquet(request["parquet"]), request)
        answer({"seconds": time.perf_counter() - begin, "live_mib": max(heap) if heap else None})
    spark.stop()


@contextmanager
def watching_heap(spark: SparkSession) -> Iterator[list[float]]:
    """Collect garbage again and again, and yield what is left in the heap each time.

    Without this, a JVM takes what it was given before it collects, so the size of its process tells little.
    """
    jvm: Any = spark.sparkContext._jvm
    heap, left = jvm.java.lang.management.ManagementFactory.getMemoryMXBean(), list[float]()

    def look() -> None:
        jvm.java.lang.System.gc()
        left.append(heap.getHeapMemoryUsage().getUsed() / _MEBIBYTE)

    with _repeating(look, seconds=_COLLECT_SECONDS):
        yield left


def write(rows: Any, request: Mapping[str, str]) -> None:
    """Schedule the rows."""
    from airflow_delay_provider.spark.kafka_sink import write_to_inbox

    if request["way"] == "JVM sink":
        write_to_inbox(rows, "bench", connection_file=request["connection"], channel=request["channel"])
        return
    options = {"connection": "bench", "connectionFile": request["connection"], "channel": request["channel"]}
    rows.write.format("delay").mode("append").options(**options).save()


def answer(what: Mapping[str, Any]) -> None:
    """Tell the process that asked."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
