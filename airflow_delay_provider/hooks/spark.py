"""spark-submit that leaves nothing behind, ends jobs nobody works on, and knows afterwards what went wrong."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk.exceptions import AirflowException

from airflow_delay_provider.exceptions import StarvedError
from airflow_delay_provider.spark.driver_log import DriverLog
from airflow_delay_provider.spark.failures import Evidence, OutputWindow
from airflow_delay_provider.spark.guarded_process import GuardedProcess, guarded, lifeline
from airflow_delay_provider.spark.raised import evidence_of
from airflow_delay_provider.spark.starvation import StarvationWatch

LOOK_SECONDS = 0.5
#: How often a driver that the cluster runs is listened to.
LISTEN_SECONDS = 10.0
#: For how long a spark-submit that is to end may still name the driver that it has submitted; Airflow gives it 5 s.
LAST_WORD_SECONDS = 3.0
MASTER_UI_PORT = 8080
#: A master that recovers names an exception here; one that does not know the driver says no more.
UNKNOWN_JOB = re.compile(
    r"Spark REST API returned failure for \S+: unknown error$|YARN RM REST API returned HTTP 404 for application"
)


class GuardedSparkSubmitHook(SparkSubmitHook):
    """The provider's hook with the same arguments and connections, run under `airflow_delay_provider.spark.guard`.

    A worker that dies takes its job with it, except one whose driver the cluster runs: that goes on and can be found
    again by its id.

    The extra ``master-ui-port`` of a connection (8080 by default) is where a standalone master is asked which worker
    has the log of a driver.

    :param starvation_timeout: how long nobody may work on a job before it is ended; None waits for ever.
    :param arguments: those of the provider's hook.
    """

    _guarded: GuardedProcess | None
    _driver_log: DriverLog | None

    def __init__(self, *, starvation_timeout: timedelta | None = timedelta(minutes=10), **arguments: Any) -> None:
        self._prepare(starvation_timeout)
        super().__init__(**arguments)

    @classmethod
    def guarding(cls, plain: SparkSubmitHook, *, starvation_timeout: timedelta | None) -> Self:
        """Return a guarded hook with the arguments of one that has submitted nothing, whatever arguments there are."""
        hook = cls.__new__(cls)
        hook.__dict__.update({name: value for name, value in vars(plain).items() if name != "_submit_sp"})
        hook._prepare(starvation_timeout)
        return hook

    @property
    def was_started(self) -> bool:
        """Whether spark-submit was run at all."""
        return self._guarded is not None

    @property
    def exit_code(self) -> int | None:
        """With which the last spark-submit failed; None when none did, and when the watchdog ended it."""
        return None if self._guarded is None or self._starved_by else self._guarded.returncode or None

    def evidence(self, error: BaseException) -> Evidence:
        """Return all that is known of an attempt that ended with ``error``."""
        told = evidence_of(error)
        if self._starved_by:  # it has not failed, and what it said before is no evidence
            return replace(told, driver_state=self._driver_status)
        self._listen_to_driver()
        return replace(
            told,
            exit_code=self.exit_code if told.exit_code is None else told.exit_code,
            output=self._window.lines() or told.output,
            driver_state=told.driver_state or self._driver_status,
            driver_output=self._driver_window.lines(),
        )

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        """Run spark-submit; nothing of it runs on afterwards, whatever is raised. A job that was ended has failed."""
        self._forget()
        guarding = {"start_new_session": True, "errors": "replace"}
        with lifeline() as held_by_guard, self._attended():
            try:
                driver_id: str | None = super().submit(application, stdin=held_by_guard, **guarding, **kwargs)
            except Exception:
                self._raise_if_starved()
                raise
            finally:
                self._leave_nothing()
        self._raise_if_starved()
        if self._kill_asked:
            raise AirflowException("the job was killed")
        return driver_id

    def on_kill(self) -> None:
        """End spark-submit and all that it started, and the driver where the cluster runs it."""
        self._kill_asked = True
        if self._is_driver_to_be_named():
            # Ended now, it might leave a driver whose id nobody knows.
            self._end_at = time.monotonic() + LAST_WORD_SECONDS
        else:
            super().on_kill()

    def _is_driver_to_be_named(self) -> bool:
        runs = self._guarded is not None and self._guarded.poll() is None
        return self._should_track_driver_status and self._driver_id is None and runs

    def _leave_nothing(self) -> None:
        if self._guarded is not None:
            self._guarded.kill()
            self._guarded.close()
        if self._kill_asked:
            super().on_kill()  # the output may have named the driver only after the kill

    @property
    def _submit_sp(self) -> GuardedProcess | None:
        return self._guarded

    @_submit_sp.setter
    def _submit_sp(self, process: subprocess.Popen[str] | None) -> None:
        self._guarded = None if process is None else GuardedProcess(process)
        if self._guarded is not None and self._kill_asked:
            self._guarded.kill()

    def _build_spark_submit_command(self, application: str) -> list[str]:
        return guarded(super()._build_spark_submit_command(application))

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        super()._process_spark_submit_log(self._observed(itr))

    def _observed(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self._window.feed(line)
            self._watch.see(time.monotonic(), line)
            yield line

    def _process_spark_status_log(self, itr: Any) -> None:
        with closing(itr):  # it is a pipe, which the provider forgets
            super()._process_spark_status_log(itr)
        self._watch.see_driver(time.monotonic(), self._driver_status)
        if self._driver_status == "RUNNING" and time.monotonic() >= self._listened_at + LISTEN_SECONDS:
            self._listen_to_driver()
        if starved_by := self._watch.starved(time.monotonic()):
            self._starved_by = starved_by
            super().on_kill()
            self._driver_status = "KILLED"  # ends the provider's loop

    def _start_driver_status_tracking(self) -> None:
        super()._start_driver_status_tracking()
        self._raise_if_starved()

    @contextmanager
    def _attended(self) -> Iterator[None]:
        """Look after spark-submit from a thread, as this one waits for the next line of its output."""
        ended = threading.Event()
        thread = threading.Thread(target=self._attend, args=(ended, find_supervisor()), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _attend(self, ended: threading.Event, supervisor: int | None) -> None:
        while not ended.wait(LOOK_SECONDS):
            process = self._guarded
            if process is None:
                continue
            if process.was_killed():
                process.kill()  # or its output would not end
            elif supervisor not in (None, os.getppid()):
                process.terminate()  # Airflow will run this task again, elsewhere
            elif self._kill_asked and (self._driver_id is not None or time.monotonic() >= self._end_at):
                process.terminate()
            elif starved_by := self._watch.starved(time.monotonic()):
                self._starved_by = starved_by
                process.terminate()

    def _raise_if_starved(self) -> None:
        if self._starved_by:
            raise StarvedError(self._starved_by) from None

    def _prepare(self, starvation_timeout: timedelta | None) -> None:
        self._kill_asked = False
        self._end_at = float("inf")
        self._patience = float("inf") if starvation_timeout is None else starvation_timeout.total_seconds()
        self._forget()

    def _forget(self) -> None:
        """Begin anew, with nothing known of earlier submissions."""
        self._guarded = None
        self._window, self._driver_window = OutputWindow(), OutputWindow()
        self._driver_log = None
        self._listened_at = 0.0
        self._watch = StarvationWatch(self._patience)
        self._starved_by = ""

    def _listen_to_driver(self) -> None:
        """Take in what a driver that the cluster runs has said since, where that can be had."""
        if not (self._should_track_driver_status and self._driver_id):
            return
        self._driver_log = self._driver_log or DriverLog(self._master_uis(), self._driver_id)
        self._listened_at = time.monotonic()
        for line in self._driver_log.read_on():
            self._driver_window.feed(line)
            self._watch.see(self._listened_at, line)

    def _master_uis(self) -> list[str]:
        port = self.get_connection(self._conn_id).extra_dejson.get("master-ui-port", MASTER_UI_PORT)
        masters = self._connection["master"].removeprefix("spark://").split(",")
        return [f"http://{master.strip().rpartition(':')[0]}:{port}" for master in masters]


def find_supervisor() -> int | None:
    """Return the process that supervises this task; None where the task runs without one, as in ``dag.test()``."""
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import CommsDecoder

    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return os.getppid() if isinstance(comms, CommsDecoder) else None


def is_unknown_job(error: BaseException) -> bool:
    """Whether the cluster says that it knows no job with the id it was asked for, as after a restart."""
    return bool(UNKNOWN_JOB.search(str(error))) or getattr(error, "status", None) == 404
