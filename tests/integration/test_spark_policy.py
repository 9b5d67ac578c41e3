"""Plain SparkSubmitOperators with the retry policy: ``airflow dags test`` and real spark-submit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.given import do_without
from tools.servers.component import wait_for
from tools.servers.kafka_distribution import find_java
from tools.servers.process import free_port
from tools.servers.server import UnavailableError
from tools.servers.spark import QUICK_JVM, client_environment

pytestmark = pytest.mark.timeout(600)

DAG = """
from datetime import timedelta
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.spark.policy import SparkRetryPolicy

with DAG("{name}", schedule=None):
    SparkSubmitOperator(
        task_id="job",
        application="{home}/{name}_job.py",
        application_args=["{home}/{name}_submissions", "{port}"],
        conn_id="spark_here",
        conf={{"spark.ui.enabled": "false", "spark.driver.extraJavaOptions": "{jvm}"}},
        driver_memory="512m",
        retries=3,
        retry_delay=timedelta(hours=1),
        retry_policy=SparkRetryPolicy(backoff=Backoff(initial=timedelta(seconds=1), cap=timedelta(seconds=2))),
    )
"""
JOB = """
import os, socket, sys, time
from pyspark.sql import SparkSession

_, submissions, port = sys.argv
again = os.path.exists(submissions)
with open(submissions, "a") as file:
    print("submitted", file=file)

def ask(port):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as source:
        return source.recv(100).decode()

spark = SparkSession.builder.getOrCreate()
{work}
spark.stop()
"""
READ_A_SOURCE = """
while again and not os.path.exists(submissions + "_source"):
    time.sleep(0.1)
print("ANSWER", spark.sparkContext.parallelize([int(port)], 1).map(ask).collect())
"""
QUERY_A_MISSING_COLUMN = 'spark.range(1).select("no_such_column").collect()'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("airflow")


@pytest.fixture(scope="module")
def airflow(home: Path) -> Callable[..., str]:
    """Run a command of an Airflow of its own and return all that it printed."""
    try:
        java = find_java()
    except UnavailableError as error:
        do_without(str(error))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")},
        **client_environment(),
        "JAVA_HOME": str(java.resolve().parents[1]),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW_CONN_SPARK_HERE": json.dumps({"conn_type": "spark", "host": "local[1]"}),
    }

    def run(*arguments: str) -> str:
        command = [str(Path(sys.executable).parent / "airflow"), *arguments]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=540)
        return done.stdout + done.stderr

    (home / "dags").mkdir()
    run("db", "migrate")
    return run


def write_dag(home: Path, name: str, work: str, port: int = 0) -> Path:
    """Write a DAG and its job; the file that is returned gets a line for each submission."""
    (home / f"{name}_job.py").write_text(JOB.format(work=work))
    (home / "dags" / f"{name}.py").write_text(DAG.format(name=name, home=home, port=port, jvm=QUICK_JVM))
    return home / f"{name}_submissions"


def count_submissions(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def answer_one(port: int, submissions: Path) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        Path(f"{submissions}_source").touch()
        server.settimeout(120)
        client, _ = server.accept()
        with client:
            client.sendall(b"it is up")


def test_a_job_whose_source_was_down_is_submitted_again_and_succeeds(home: Path, airflow: Callable[..., str]) -> None:
    port = free_port()
    submissions = write_dag(home, "transient", READ_A_SOURCE, port)
    with ThreadPoolExecutor() as threads:
        dag_run = threads.submit(airflow, "dags", "test", "transient")
        # The second job waits for the source.
        wait_for(lambda: count_submissions(submissions) == 2, what="the job is submitted again", seconds=400)
        answer_one(port, submissions)
        log = dag_run.result()

    assert "ANSWER ['it is up']" in log
    assert count_submissions(submissions) == 2
    assert "transient: " in log
    assert "state=success" in log


def test_a_job_that_can_never_succeed_fails_at_the_first_try_with_the_reason(
    home: Path, airflow: Callable[..., str]
) -> None:
    submissions = write_dag(home, "permanent", QUERY_A_MISSING_COLUMN)

    log = airflow("dags", "test", "permanent")

    assert count_submissions(submissions) == 1
    reason = next(line for line in log.splitlines() if "Retry policy decision" in line)
    assert "fail" in reason
    assert "permanent: " in reason
    assert "UNRESOLVED_COLUMN" in reason
