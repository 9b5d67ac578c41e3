"""Run spark-submit under a guard, stop jobs that starve, and collect the evidence of a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk.exceptions import AirflowException

from airflow_delay_provider.domain.exceptions import StarvedError
from airflow_delay_provider.spark.failures import Evidence, OutputWindow
from airflow_delay_provider.spark.failures.classifier import evidence_of
from airflow_delay_provider.spark.process import guard
from airflow_delay_provider.spark.process.driver_watch import DriverLog, StarvationWatchdog
from airflow_delay_provider.spark.process.job_environment import JobEnvironment, check_job_connections

#: The guard kills processes that do not stop; it needs a little longer than they get.
GUARD_STOP_SECONDS = guard.GRACE_SECONDS + 2
POLL_SECONDS = 0.5
#: Between two reads of the log of a driver that the cluster runs.
DRIVER_LOG_SECONDS = 10.0
#: How long a killed spark-submit may still print the id of its driver; Airflow gives it 5 s.
DRIVER_ID_SECONDS = 3.0
MASTER_UI_PORT = 8080
#: A recovering master names an exception here; one that does not know the driver does not.
UNKNOWN_JOB = re.compile(
    r"Spark REST API returned failure for \S+: unknown error$|YARN RM REST API returned HTTP 404 for application"
)


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` under a guard; its standard input must be a :func:`lifeline`."""
    return [sys.executable, "-I", "-S", guard.__file__, *command]


@contextmanager
def lifeline() -> Iterator[int]:
    """Yield the read end of a pipe that only this process keeps open: the reader notices when this process dies."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(writer)
        os.close(reader)


class GuardedProcess:
    """The process of a guard, which must not be killed: it would leave its command behind."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def kill(self) -> None:
        """Let the guard stop everything; return once it has."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GUARD_STOP_SECONDS)
        if self.was_killed():
            guard.end_session(self._process.pid)

    def was_killed(self) -> bool:
        """Tell whether the guard was killed before it could stop its command."""
        code = self._process.poll()
        return code is not None and code < 0

    def close(self) -> None:
        """Close our end of its output."""
        if self._process.stdout is not None:
            self._process.stdout.close()


class GuardedSparkSubmitHook(SparkSubmitHook):
    """The provider's hook with the same arguments and connections, run under `spark.process.guard`.

    If the worker dies, its job stops, except a job whose driver runs on the cluster: that one continues, and its
    status can be read by its id.

    The web UI of a standalone master says which worker has the log of a driver. Its port is ``master-ui-port`` in the
    extra of the connection (8080 by default).

    :param starvation_timeout: after how long without executors a job is stopped; None is never.
    :param arguments: those of the provider's hook.
    """

    #: What spark-submit gets in addition to the environment of the task.
    job_environment: JobEnvironment
    _guarded: GuardedProcess | None
    _driver_log: DriverLog | None

    def __init__(self, *, starvation_timeout: timedelta | None = timedelta(minutes=10), **arguments: Any) -> None:
        self._prepare(starvation_timeout)
        super().__init__(**arguments)

    @classmethod
    def guarding(cls, plain: SparkSubmitHook, *, starvation_timeout: timedelta | None) -> Self:
        """Return a guarded hook with all arguments of a plain one that has submitted nothing."""
        hook = cls.__new__(cls)
        hook.__dict__.update({name: value for name, value in vars(plain).items() if name != "_submit_sp"})
        hook._prepare(starvation_timeout)
        return hook

    @property
    def was_started(self) -> bool:
        """Whether spark-submit was started."""
        return self._guarded is not None

    @property
    def exit_code(self) -> int | None:
        """Of the last spark-submit that failed; None if none did, or if the watchdog stopped it."""
        return None if self._guarded is None or self._starved_by else self._guarded.returncode or None

    def evidence(self, error: BaseException) -> Evidence:
        """Return the evidence of an attempt that failed with ``error``."""
        raised = evidence_of(error)
        if self._starved_by:  # the job did not fail by itself, so its output is no evidence
            return replace(raised, driver_state=self._driver_status)
        self._read_driver_log()
        return replace(
            raised,
            exit_code=self.exit_code if raised.exit_code is None else raised.exit_code,
            output=self._window.lines() or raised.output,
            driver_state=raised.driver_state or self._driver_status,
            driver_output=self._driver_window.lines(),
        )

    def check_job_connections(self, conn_ids: Sequence[str]) -> None:
        """Raise unless the driver runs inside of spark-submit, which alone gets connections."""
        deploy_mode = self._connection["deploy_mode"] or (self._conf or {}).get("spark.submit.deployMode")
        check_job_connections(conn_ids, deploy_mode=deploy_mode)

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        """Run spark-submit; none of its processes remains afterwards. A job that was stopped has failed."""
        self._reset()
        guarding = {"start_new_session": True, "errors": "replace"}
        with lifeline() as stdin, self._watched():
            try:
                driver_id: str | None = super().submit(application, stdin=stdin, **guarding, **kwargs)
            except Exception:
                self._raise_if_starved()
                raise
            finally:
                self._clean_up()
        self._raise_if_starved()
        if self._kill_asked:
            raise AirflowException("the job was killed")
        return driver_id

    def on_kill(self) -> None:
        """Stop spark-submit with all its processes, and the driver if it runs on the cluster."""
        self._kill_asked = True
        if self._is_driver_id_awaited():
            # Stopped now, it might leave a driver whose id is unknown.
            self._kill_at = time.monotonic() + DRIVER_ID_SECONDS
        else:
            super().on_kill()

    def _is_driver_id_awaited(self) -> bool:
        runs = self._guarded is not None and self._guarded.poll() is None
        return self._should_track_driver_status and self._driver_id is None and runs

    def _clean_up(self) -> None:
        if self._guarded is not None:
            self._guarded.kill()
            self._guarded.close()
        if self._kill_asked:
            super().on_kill()  # the output may have named the driver after the kill

    @property
    def _submit_sp(self) -> GuardedProcess | None:
        return self._guarded

    @_submit_sp.setter
    def _submit_sp(self, process: subprocess.Popen[str] | None) -> None:
        self._guarded = None if process is None else GuardedProcess(process)
        if self._guarded is not None and self._kill_asked:
            self._guarded.kill()

    def _build_spark_submit_command(self, application: str) -> list[str]:
        command = guarded(super()._build_spark_submit_command(application))
        if variables := self.job_environment.variables:
            # Not the provider's env_vars: for YARN and Kubernetes it turns these into arguments of spark-submit.
            self._env = {**(self._env or {}), **variables}
        return command

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        super()._process_spark_submit_log(self._observed(itr))

    def _observed(self, lines: Iterable[str]) -> Iterator[str]:
        for printed in lines:
            line = self.job_environment.hide_secrets(printed)
            self._window.feed(line)
            self._watchdog.observe(time.monotonic(), line)
            yield line

    def _process_spark_status_log(self, itr: Any) -> None:
        with closing(itr):  # it is a pipe, which the provider does not close
            super()._process_spark_status_log(itr)
        self._watchdog.observe_driver(time.monotonic(), self._driver_status)
        if self._driver_status == "RUNNING" and time.monotonic() >= self._driver_log_read_at + DRIVER_LOG_SECONDS:
            self._read_driver_log()
        if starved_by := self._watchdog.starved(time.monotonic()):
            self._starved_by = starved_by
            super().on_kill()
            self._driver_status = "KILLED"  # ends the provider's loop

    def _start_driver_status_tracking(self) -> None:
        super()._start_driver_status_tracking()
        self._raise_if_starved()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Watch spark-submit from a thread, because this one blocks on its output."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended, find_supervisor()), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event, supervisor: int | None) -> None:
        while not ended.wait(POLL_SECONDS):
            process = self._guarded
            if process is None:
                continue
            if process.was_killed():
                process.kill()  # otherwise its output would not end
            elif supervisor not in (None, os.getppid()):
                process.terminate()  # Airflow runs this task again elsewhere
            elif self._kill_asked and (self._driver_id is not None or time.monotonic() >= self._kill_at):
                process.terminate()
            elif starved_by := self._watchdog.starved(time.monotonic()):
                self._starved_by = starved_by
                process.terminate()

    def _raise_if_starved(self) -> None:
        if self._starved_by:
            raise StarvedError(self._starved_by) from None

    def _prepare(self, starvation_timeout: timedelta | None) -> None:
        self.job_environment = JobEnvironment()
        self._kill_asked = False
        self._kill_at = float("inf")
        self._starvation_seconds = float("inf") if starvation_timeout is None else starvation_timeout.total_seconds()
        self._reset()

    def _reset(self) -> None:
        """Forget earlier submissions."""
        self._guarded = None
        self._window, self._driver_window = OutputWindow(), OutputWindow()
        self._driver_log = None
        self._driver_log_read_at = 0.0
        self._watchdog = StarvationWatchdog(self._starvation_seconds)
        self._starved_by = ""

    def _read_driver_log(self) -> None:
        """Read the new log lines of a driver that runs on the cluster, if its log can be reached."""
        if not (self._should_track_driver_status and self._driver_id):
            return
        self._driver_log = self._driver_log or DriverLog(self._master_uis(), self._driver_id)
        self._driver_log_read_at = time.monotonic()
        for line in self._driver_log.new_lines():
            self._driver_window.feed(line)
            self._watchdog.observe(self._driver_log_read_at, line)

    def _master_uis(self) -> list[str]:
        port = self.get_connection(self._conn_id).extra_dejson.get("master-ui-port", MASTER_UI_PORT)
        masters = self._connection["master"].removeprefix("spark://").split(",")
        return [f"http://{master.strip().rpartition(':')[0]}:{port}" for master in masters]


def find_supervisor() -> int | None:
    """Return the process that supervises this task; None if there is none, as in ``dag.test()``."""
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import CommsDecoder

    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return os.getppid() if isinstance(comms, CommsDecoder) else None


def is_unknown_job(error: BaseException) -> bool:
    """Tell whether the cluster does not know the requested job, as after a restart of the cluster."""
    return bool(UNKNOWN_JOB.search(str(error))) or getattr(error, "status", None) == 404
