"""The hook around spark-submit, with programs of ours in its place: what it keeps, passes on and ends."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk.exceptions import AirflowException

from airflow_delay_provider.domain.exceptions import StarvedError
from airflow_delay_provider.spark.failures import Verdict, classify
from airflow_delay_provider.spark.process.submit import GuardedSparkSubmitHook, is_unknown_job
from tools.servers import component

wait_for = partial(component.wait_for, seconds=60, interval=0.05)

WARNING = "WARN TaskSchedulerImpl: Initial job has not accepted any resources"
#: As Airflow supervises: the task is forked, and has a line to whom forked it.
SUPERVISED = """
import os, socket, sys, time
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import CommsDecoder
from airflow_delay_provider.spark.process.submit import GuardedSparkSubmitHook
if os.fork():
    time.sleep(600)
os.setpgid(0, 0)
hook = GuardedSparkSubmitHook(conn_id="spark_test", spark_binary=sys.argv[1])
task_runner.SUPERVISOR_COMMS = CommsDecoder(socket=socket.socketpair()[0])
hook.submit("job.py")
"""

MakeHook = Callable[..., GuardedSparkSubmitHook]


@pytest.fixture
def mark() -> str:
    return uuid4().hex


@pytest.fixture
def make_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> Iterator[MakeHook]:
    """Makes hooks whose spark-submit is a shell script; what one leaves running fails its test."""
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_TEST", json.dumps({"conn_type": "spark", "host": "local[1]"}))

    def make(script: str, **settings: float) -> GuardedSparkSubmitHook:
        timeout = {name: timedelta(seconds=seconds) for name, seconds in settings.items()}
        return GuardedSparkSubmitHook(conn_id="spark_test", spark_binary=program(tmp_path, mark, script), **timeout)

    yield make
    left = marked(mark)
    for process in left:
        process.kill()
    assert left == []


def program(folder: Path, mark: str, script: str) -> str:
    """Write a program that is known by its name as long as it runs."""
    path = folder / f"spark-submit-{mark}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def marked(mark: str) -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter(["cmdline", "status"])
        if mark in " ".join(each.info["cmdline"] or ()) and each.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_lines_of_the_whole_output_are_kept_and_still_reach_the_log(
    make_hook: MakeHook, capfd: pytest.CaptureFixture[str]
) -> None:
    decisive = "Caused by: java.net.ConnectException: Connection refused"
    hook = make_hook(f"echo '{decisive}'; seq 1 2000; exit 1")
    with pytest.raises(AirflowException, match="Error code is: 1") as caught:
        hook.submit("job.py")
    evidence = hook.evidence(caught.value)
    assert decisive in evidence.output
    assert evidence.output[-1] == "2000"
    assert decisive not in str(caught.value)
    assert " 1999 " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("script", "code"), [("exit 1", 1), ("exit 75", 75), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_the_exit_code_is_passed_on(make_hook: MakeHook, script: str, code: int) -> None:
    hook = make_hook(script)
    with pytest.raises(AirflowException, match=f"Error code is: {code}") as caught:
        hook.submit("job.py")
    assert hook.exit_code == code
    assert hook.evidence(caught.value).exit_code == code


def test_output_that_is_no_text_does_not_fail_the_task(make_hook: MakeHook) -> None:
    make_hook(r"printf 'caf\351\n'").submit("job.py")


def test_processes_that_spark_submit_leaves_running_do_not_block_the_task(make_hook: MakeHook, mark: str) -> None:
    hook = make_hook(f"setsid tail -f /dev/null {mark} & exit 0")
    hook.submit("job.py")
    assert hook.exit_code is None


def test_an_attempt_is_not_blamed_for_the_one_before(make_hook: MakeHook, tmp_path: Path, mark: str) -> None:
    hook = make_hook("echo Caused by: the first; exit 1")
    with pytest.raises(AirflowException):
        hook.submit("job.py")
    program(tmp_path, mark, "echo Caused by: the second; exit 2")
    with pytest.raises(AirflowException) as caught:
        hook.submit("job.py")
    evidence = hook.evidence(caught.value)
    assert list(evidence.output) == ["Caused by: the second"]
    assert evidence.exit_code == 2


def test_a_kill_ends_everything_that_was_started(make_hook: MakeHook, mark: str) -> None:
    hook = make_hook(f"tail -f /dev/null {mark} & wait")
    killer = threading.Thread(target=lambda: (wait_for(lambda: len(marked(mark)) > 2, what="all run"), hook.on_kill()))
    killer.start()
    with pytest.raises(AirflowException, match="Error code is: 143"):
        hook.submit("job.py")
    killer.join()


def test_a_kill_before_the_submission_is_not_forgotten(make_hook: MakeHook, mark: str) -> None:
    hook = make_hook(f"tail -f /dev/null {mark}")
    hook.on_kill()
    with pytest.raises(AirflowException):
        hook.submit("job.py")


def test_a_killed_job_has_failed_also_when_it_ends_as_if_nothing_were(make_hook: MakeHook, mark: str) -> None:
    """As drivers do that handle SIGTERM."""
    hook = make_hook(f"trap 'exit 0' TERM; echo ready; kill -TERM {os.getpid()}; tail -f /dev/null {mark}")
    before = signal.signal(signal.SIGTERM, lambda *_: hook.on_kill())
    try:
        with pytest.raises(AirflowException, match="the job was killed"):
            hook.submit("job.py")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_starved_job_has_failed_also_when_it_ends_as_if_nothing_were(make_hook: MakeHook) -> None:
    hook = make_hook(f"trap 'exit 0' TERM; while true; do echo '{WARNING}'; sleep 0.1; done", starvation_timeout=0.5)
    with pytest.raises(StarvedError):
        hook.submit("job.py")


def test_an_error_while_the_job_runs_ends_it(make_hook: MakeHook, mark: str) -> None:
    """As when Airflow raises the execution time-out in the middle of a line."""

    def time_out(_signum: int, _frame: object) -> None:
        raise TimeoutError("execution_timeout")

    before = signal.signal(signal.SIGALRM, time_out)
    hook = make_hook(f"kill -ALRM {os.getpid()}; tail -f /dev/null {mark}")
    try:
        with pytest.raises(TimeoutError, match="execution_timeout"):
            hook.submit("job.py")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert marked(mark) == []


def test_a_guard_that_was_killed_fails_the_task_and_leaves_nothing(make_hook: MakeHook, mark: str) -> None:
    hook = make_hook(f"tail -f /dev/null {mark} & kill -9 $PPID; wait")
    with pytest.raises(AirflowException, match="Error code is: -9"):
        hook.submit("job.py")


def test_a_job_that_no_executor_accepts_is_stopped_by_the_watchdog(make_hook: MakeHook) -> None:
    survived = "ERROR Main: org.apache.spark.sql.AnalysisException: [TABLE_OR_VIEW_NOT_FOUND] no table; SQLSTATE: 42P01"
    script = f"echo '{survived}'; while true; do echo '{WARNING}'; sleep 0.1; done"
    hook = make_hook(script, starvation_timeout=0.5)
    with pytest.raises(StarvedError, match=r"no executor accepted work for .* s \(starvation") as caught:
        hook.submit("job.py")
    evidence = hook.evidence(caught.value)
    assert "starvation watchdog" in evidence.exception
    assert evidence.exit_code is None
    assert not evidence.output
    assert classify(evidence).verdict is Verdict.INFRASTRUCTURE


def test_a_task_whose_supervisor_was_killed_ends_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow runs such a task again, while the old one would continue."""
    mark = uuid4().hex
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_TEST", json.dumps({"conn_type": "spark", "host": "local[1]"}))
    binary = program(tmp_path, mark, f"tail -f /dev/null {mark}")
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISED, binary], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: any("tail" in each.info["cmdline"] for each in marked(mark)), what="the job runs", seconds=90)
        supervisor.kill()
        supervisor.wait()
        wait_for(lambda: not marked(mark), what="nothing runs")
    finally:
        supervisor.kill()
        supervisor.wait()
        for process in marked(mark):
            process.kill()


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("Spark REST API returned failure for driver-20261117124933-0000: unknown error", True),
        ("YARN RM REST API returned HTTP 404 for application application_1_2: not found", True),
        (
            "Spark REST API returned failure for driver-20261117124933-0000: Exception from the cluster:\n"
            "java.lang.Exception: Current state is not alive: RECOVERING",
            False,
        ),
        ("YARN RM REST API returned HTTP 503 for application application_1_2: busy", False),
        ("Driver driver-20261117124933-0000 exited with status FAILED", False),
    ],
)
def test_a_job_that_the_cluster_does_not_know_is_distinguished_from_other_errors(text: str, unknown: bool) -> None:
    assert is_unknown_job(RuntimeError(text)) is unknown


def test_the_provider_still_has_the_seams_that_the_hook_is_attached_to() -> None:
    """Private ones: should this fail after an update of the Spark provider, compare its hook with ours."""
    seams = {
        "submit": ["self", "application", "kwargs"],
        "on_kill": ["self"],
        "_build_spark_submit_command": ["self", "application"],
        "_process_spark_submit_log": ["self", "itr"],
        "_process_spark_status_log": ["self", "itr"],
        "_start_driver_status_tracking": ["self"],
    }
    assert {name: list(inspect.signature(getattr(SparkSubmitHook, name)).parameters) for name in seams} == seams
    submit, on_kill = inspect.getsource(SparkSubmitHook.submit), inspect.getsource(SparkSubmitHook.on_kill)
    assert "self._submit_sp = subprocess.Popen(" in submit
    assert "self._process_spark_submit_log(iter(self._submit_sp.stdout))" in submit
    assert "self._submit_sp.kill()" in on_kill
    tracking = inspect.getsource(SparkSubmitHook._start_driver_status_tracking)
    assert "self._process_spark_status_log(iter(status_process.stdout))" in tracking
    attributes = inspect.getsource(SparkSubmitHook.__init__)
    for name in ("_conn_id", "_connection", "_driver_id", "_driver_status", "_should_track_driver_status"):
        assert f"self.{name}" in attributes
