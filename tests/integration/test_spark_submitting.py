"""Jobs on a real Spark: what is known of a failed one, and what is left of an ended one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowException

from airflow_delay_provider.domain.exceptions import StarvedError
from airflow_delay_provider.spark.failures import Verdict, classify
from airflow_delay_provider.spark.process import driver_watch
from airflow_delay_provider.spark.process import submit as spark
from airflow_delay_provider.spark.process.submit import GuardedSparkSubmitHook, is_unknown_job
from tests.sparks import (
    CONF,
    CONN_ID,
    JOBS,
    connection_of,
    private_cluster,
    running_with,
    submitting_environment,
    submitting_to,
)
from tools.servers import component
from tools.servers.process import free_port
from tools.servers.spark import SparkCluster

pytestmark = pytest.mark.timeout(600)

wait_for = partial(component.wait_for, seconds=180, interval=0.1)

TASK = Path(__file__).with_name("submitting_task.py")
PASSING = (Verdict.TRANSIENT, Verdict.INFRASTRUCTURE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with private_cluster(tmp_path_factory.mktemp("spark")) as started:
        yield started


@pytest.fixture
def mark() -> Iterator[str]:
    """An argument by which the processes of one job are known; they are all gone in the end."""
    chosen = uuid4().hex
    yield chosen
    left = running_with(chosen)
    for process in left:
        process.kill()
    assert left == []


def make_hook(*arguments: object, starvation_seconds: float = 600, **settings: Any) -> GuardedSparkSubmitHook:
    return GuardedSparkSubmitHook(
        conn_id=CONN_ID,
        conf=CONF,
        application_args=[str(each) for each in arguments],
        starvation_timeout=timedelta(seconds=starvation_seconds),
        **settings,
    )


# -- what is known of a job that failed ------------------------------------------------------------------------------


def test_the_refused_connection_of_a_jvm_is_found_in_the_whole_output() -> None:
    """The last lines, which the provider keeps, do not hold it."""
    with submitting_to(None):
        hook = make_hook(f"127.0.0.1:{free_port()}")
        hook._conf = {**CONF, "spark.hadoop.ipc.client.connect.max.retries": "0"}
        with pytest.raises(AirflowException, match="Error code is: 1") as caught:
            hook.submit(str(JOBS / "read_hdfs.py"))
        evidence = hook.evidence(caught.value)
    assert any("java.net.ConnectException" in line and "Connection refused" in line for line in evidence.output)
    assert evidence.exit_code == 1
    assert classify(evidence).verdict in PASSING


def test_the_exit_code_of_a_python_driver_is_passed_on() -> None:
    with submitting_to(None):
        hook = make_hook(75)
        with pytest.raises(AirflowException) as caught:
            hook.submit(str(JOBS / "exit_with.py"))
        evidence = hook.evidence(caught.value)
    assert evidence.exit_code == 75
    assert "the driver has decided to end" in evidence.output


# -- what is left of a job that was ended ----------------------------------------------------------------------------


@pytest.fixture
def sign_of_life(tmp_path: Path) -> Path:
    """A file that an executor writes when it works on a job."""
    return tmp_path / "works"


StartTask = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start_task(cluster: SparkCluster, tmp_path: Path) -> Iterator[StartTask]:
    """Starts a process that submits a job as a task does."""
    started: list[subprocess.Popen[bytes]] = []

    def start(application: Path, *arguments: object, **settings: Any) -> subprocess.Popen[bytes]:
        settings = {"conn_id": CONN_ID, "conf": CONF, "application_args": [str(each) for each in arguments], **settings}
        command = [sys.executable, str(TASK), json.dumps(settings), str(application)]
        env = {**os.environ, **submitting_environment(connection_of(cluster))}
        with (tmp_path / "task.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def task(start_task: StartTask, mark: str, sign_of_life: Path) -> subprocess.Popen[bytes]:
    """A process that submits a job which would run for ever."""
    return start_task(JOBS / "work_for_ever.py", mark, sign_of_life)


def guard_runs(mark: str, _life: Path) -> bool:
    return any("guard.py" in " ".join(each.info["cmdline"]) for each in running_with(mark))


def jvm_runs(mark: str, _life: Path) -> bool:
    return any("org.apache.spark.deploy.SparkSubmit" in each.info["cmdline"] for each in running_with(mark))


def python_driver_runs(mark: str, _life: Path) -> bool:
    return any(str(JOBS / "work_for_ever.py") in each.info["cmdline"][:2] for each in running_with(mark))


def executor_works(_mark: str, sign_of_life: Path) -> bool:
    return sign_of_life.exists()


@pytest.mark.parametrize(
    ("signum", "moment"),
    [
        (signal.SIGTERM, guard_runs),
        (signal.SIGTERM, jvm_runs),
        (signal.SIGTERM, executor_works),
        (signal.SIGKILL, python_driver_runs),
        (signal.SIGKILL, executor_works),
    ],
)
def test_a_task_that_is_ended_at_any_moment_leaves_nothing(
    cluster: SparkCluster,
    task: subprocess.Popen[bytes],
    mark: str,
    sign_of_life: Path,
    signum: int,
    moment: Callable[[str, Path], bool],
) -> None:
    """SIGTERM is how Airflow ends a task, which calls ``on_kill``; SIGKILL is a worker that dies."""
    wait_for(lambda: moment(mark, sign_of_life), what=moment.__name__)
    task.send_signal(signum)
    task.wait(60)
    wait_for(lambda: not running_with(mark), what="nothing of the job runs")
    wait_for(lambda: not cluster.applications(), what="the master knows of no application")


def test_a_guard_killed_in_mid_job_leaves_nothing(
    cluster: SparkCluster, task: subprocess.Popen[bytes], mark: str, sign_of_life: Path
) -> None:
    wait_for(sign_of_life.exists, what="an executor works")
    next(each for each in running_with(mark) if "guard.py" in " ".join(each.info["cmdline"])).kill()
    assert task.wait(60) != 0
    wait_for(lambda: not running_with(mark), what="nothing of the job runs")
    wait_for(lambda: not cluster.applications(), what="the master knows of no application")


# -- jobs that would wait for ever -----------------------------------------------------------------------------------


def test_a_job_whose_only_worker_was_killed_is_ended(cluster: SparkCluster, mark: str, sign_of_life: Path) -> None:
    killer = threading.Thread(
        target=lambda: (wait_for(sign_of_life.exists, what="an executor works"), cluster.kill_worker())
    )
    killer.start()
    with submitting_to(cluster):
        hook = make_hook(mark, sign_of_life, starvation_seconds=3)
        # For as long as a busy machine needs to start an executor, it does not count as missing.
        hook._conf = {**CONF, "spark.starvation.timeout": "60s"}
        try:
            with pytest.raises(StarvedError, match="all executors were lost and none came back") as caught:
                hook.submit(str(JOBS / "work_for_ever.py"))
        finally:
            killer.join()
    assert classify(hook.evidence(caught.value)).verdict is Verdict.INFRASTRUCTURE
    wait_for(lambda: not cluster.applications(), what="the master knows of no application")


@pytest.fixture
def no_worker(cluster: SparkCluster) -> Iterator[SparkCluster]:
    cluster.kill_worker()
    wait_for(lambda: not cluster.has_worker(), what="the worker is missed")
    yield cluster
    cluster.start_worker()


def test_a_job_that_no_worker_accepts_is_ended(no_worker: SparkCluster, mark: str, sign_of_life: Path) -> None:
    with submitting_to(no_worker):
        hook = make_hook(mark, sign_of_life, starvation_seconds=2)
        with pytest.raises(StarvedError, match="no executor accepted work") as caught:
            hook.submit(str(JOBS / "work_for_ever.py"))
    assert classify(hook.evidence(caught.value)).verdict is Verdict.INFRASTRUCTURE
    wait_for(lambda: not no_worker.applications(), what="the master knows of no application")


# -- drivers that the cluster runs -----------------------------------------------------------------------------------


#: The cluster runs JVM programs only; this one runs a Python program.
PYTHON_DRIVER = {"deploy_mode": "cluster", "java_class": "org.apache.spark.deploy.PythonRunner"}


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    """What is submitted, although there is nothing in it."""
    path = tmp_path / "nothing.jar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("META-INF/MANIFEST.MF", "Manifest-Version: 1.0\n")
    return path


def test_a_driver_that_was_only_just_submitted_is_ended_with_its_task(
    cluster: SparkCluster, start_task: StartTask, jar: Path, mark: str, sign_of_life: Path
) -> None:
    """The master has it before spark-submit says its id."""
    task = start_task(jar, JOBS / "work_for_ever.py", "", mark, sign_of_life, **PYTHON_DRIVER)
    wait_for(cluster.drivers, what="the driver is submitted", interval=0.01)
    task.terminate()
    assert task.wait(60) != 0
    wait_for(lambda: not cluster.drivers(), what="the master has no driver")
    wait_for(lambda: not running_with(mark), what="nothing of the job runs")


def test_the_log_of_a_driver_that_the_cluster_ran_is_fetched_and_a_restarted_master_does_not_know_it(
    cluster: SparkCluster, jar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_watch, "TIMEOUT_SECONDS", 60)
    with submitting_to(cluster):
        hook = make_hook(JOBS / "refused.py", "", free_port(), **PYTHON_DRIVER)
        assert hook.submit(str(jar)) == hook._driver_id
        operator = SparkSubmitOperator(task_id="submit", conn_id=CONN_ID)
        operator._hook = hook
        with pytest.raises(RuntimeError, match="exited with status FAILED") as caught:
            operator.poll_until_complete(hook._driver_id, {})
        evidence = hook.evidence(caught.value)
        assert evidence.driver_state == "FAILED"
        assert "ConnectionRefusedError: [Errno 111] Connection refused" in evidence.driver_output
        assert classify(evidence).verdict in PASSING

        assert operator.get_job_status(hook._driver_id, {}) == "FAILED"
        cluster.kill_master()
        with pytest.raises(OSError, match="refused") as down:
            operator.get_job_status(hook._driver_id, {})
        assert not is_unknown_job(down.value)
        assert hook.evidence(caught.value) == evidence
        cluster.start_master()
        with pytest.raises(RuntimeError) as unknown:
            operator.get_job_status(hook._driver_id, {})
        assert is_unknown_job(unknown.value)
        wait_for(cluster.has_worker, what="the worker has come back")


def test_a_driver_that_no_worker_takes_is_ended(no_worker: SparkCluster, jar: Path) -> None:
    with submitting_to(no_worker):
        hook = make_hook(JOBS / "exit_with.py", "", 0, starvation_seconds=2, **PYTHON_DRIVER)
        hook.submit(str(jar))
        with pytest.raises(StarvedError, match="no worker took the driver") as caught:
            hook._start_driver_status_tracking()
        assert classify(hook.evidence(caught.value)).verdict is Verdict.INFRASTRUCTURE
    assert no_worker.drivers() == []


def test_a_driver_that_took_the_last_core_of_the_cluster_is_ended(
    cluster: SparkCluster, jar: Path, mark: str, sign_of_life: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for executors that have nowhere to run, and says so in its log only."""
    monkeypatch.setattr(spark, "DRIVER_LOG_SECONDS", 1)
    with submitting_to(cluster):
        arguments = (JOBS / "work_for_ever.py", "", mark, sign_of_life)
        hook = make_hook(*arguments, starvation_seconds=2, **PYTHON_DRIVER)
        hook.submit(str(jar))
        with pytest.raises(StarvedError, match="no executor accepted work") as caught:
            hook._start_driver_status_tracking()
        assert classify(hook.evidence(caught.value)).verdict is Verdict.INFRASTRUCTURE
    wait_for(lambda: not running_with(mark), what="nothing of the job runs")
