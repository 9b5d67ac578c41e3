"""Run a job as a command: one sentence for each known problem, exit codes, and progress while Spark works."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from airflow_delay_provider.domain import exceptions
from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError, InvalidMessageError

#: Between two lines of progress.
PROGRESS_SECONDS = 5.0
JAVA_REMEDY = "install Java 17 or newer (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME"
#: They print the Java stack trace of a failure that the job itself reports in one sentence.
_CHATTY = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.scheduler.TaskSchedulerImpl",
    "org.apache.spark.sql.execution.datasources.v2",
    "org.apache.spark.util.Utils",
)
_OWN_ERROR = re.compile(r"airflow_delay_provider\.[\w.]+\.(\w+Error): (.+)$", re.MULTILINE)
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)?)\]")
_JAVA_MISSING = ("JAVA_GATEWAY_EXITED", "[JAVA_GATEWAY_EXITED]")


class ExitCode(IntEnum):
    """Exit codes of all jobs."""

    OK = 0
    #: The job could not do its work, as a broker did not answer; run it again.
    FAILED = 1
    #: An argument, the input, the connection or the machine has to be corrected first.
    USAGE = 2
    #: All good rows are scheduled, and ``--on-rejects fail`` is given.
    REJECTS = 3
    #: The report is written, and ``--fail-on-slo`` is given.
    SLO_MISSED = 3
    INTERRUPTED = 130


class JobError(DelayError):
    """A job ends with this sentence and this exit code."""

    def __init__(self, sentence: str, *, code: ExitCode) -> None:
        super().__init__(sentence)
        self.code = code


class UsageError(JobError):
    """An option is wrong. Nothing was changed."""

    def __init__(self, option: str, problem: str, remedy: str) -> None:
        super().__init__(f"{option}: {problem}; {remedy}", code=ExitCode.USAGE)


def run_command(name: str, work: Callable[[], None]) -> int:
    """Do the work; turn a known problem into one sentence on stderr, and return the exit code.

    The sentence begins with ``error`` if somebody has to correct something first, and with ``failed`` if the job may be
    run again as it is. ``SparkSubmitRetryOperator`` knows the difference (``delay-job`` in ``rules.yaml``).
    """
    # PySpark would print each error of a query as one line of JSON with the whole Java stack trace.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    try:
        work()
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        return int(ExitCode.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - what is not known is printed in full
        return int(report_problem(name, error).code)
    return int(ExitCode.OK)


def report_problem(name: str, error: BaseException) -> JobError:
    """Print a problem as one sentence, after the traceback if it is not known, and return it."""
    problem = known_problem(error)
    if problem is None:
        traceback.print_exception(error)
        problem = JobError(f"{type(error).__name__}; see the traceback above", code=ExitCode.FAILED)
    kind = "failed" if problem.code is ExitCode.FAILED else "error"
    sys.stderr.write(f"{name}: {kind}: {problem}\n")
    return problem


def say(line: str) -> None:
    """Print one line of output at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def known_problem(error: BaseException) -> JobError | None:
    """Return a known problem in one sentence; None if it is not known."""
    if isinstance(error, JobError):
        return error
    if isinstance(error, DelayError):
        return _own_problem(type(error).__name__, str(error))
    text = str(error)
    if any(mark in text for mark in _JAVA_MISSING):
        sentence = f"Java: Spark did not start, as no Java is found or it is too old; {JAVA_REMEDY}"
        return JobError(sentence, code=ExitCode.USAGE)
    if own := _OWN_ERROR.findall(text):
        # The error of an executor, or of the data source's part on the driver, inside of Spark's own.
        return _own_problem(*own[-1])
    return None


def _own_problem(name: str, sentence: str) -> JobError:
    kind: type[BaseException] = getattr(exceptions, name, DelayError)
    is_ours_to_correct = issubclass(kind, ConfigurationError | InvalidMessageError)
    return JobError(" ".join(sentence.split()), code=ExitCode.USAGE if is_ours_to_correct else ExitCode.FAILED)


def condition_of(error: BaseException) -> str:
    """Return Spark's name for an error, such as ``PATH_NOT_FOUND``; empty if it has none."""
    own = error.getCondition() if isinstance(error, PySparkException) else None
    found = _CONDITION.search(str(error)) if own is None else None
    return own or (found[1] if found else "")


@contextmanager
def spark_session(name: str, *, verbose: bool = False) -> Iterator[SparkSession]:
    """Start Spark, or use the running session, which then goes on."""
    was_active = SparkSession.getActiveSession() is not None
    spark = SparkSession.builder.appName(name).getOrCreate()
    if not verbose:
        _silence(spark)
    try:
        yield spark
    finally:
        if not was_active:
            spark.stop()


def _silence(spark: SparkSession) -> None:
    jvm: Any = spark.sparkContext._jvm
    log4j = jvm.org.apache.logging.log4j
    for logger in _CHATTY:
        log4j.core.config.Configurator.setLevel(logger, log4j.Level.OFF)


@contextmanager
def progress(spark: SparkSession, what: str) -> Iterator[None]:
    """Print how many tasks of Spark are done, while it works for long."""
    ended = threading.Event()
    thread = threading.Thread(target=_print_progress, args=(spark, what, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _print_progress(spark: SparkSession, what: str, ended: threading.Event) -> None:
    began = time.monotonic()
    tracker = spark.sparkContext.statusTracker()
    while not ended.wait(PROGRESS_SECONDS):
        with suppress(Exception):  # it ends with the session, at any moment
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            done = sum(stage.numCompletedTasks for stage in stages if stage)
            tasks = sum(stage.numTasks for stage in stages if stage)
            # Before the first task, Spark plans the query, and the broker is asked whether it is there.
            work = f"{done} of {tasks} tasks done" if tasks else "preparing"
            say(f"{what}: {work}, {time.monotonic() - began:.0f} s")
