"""Spark jobs that fail in a real Airflow: those that may recover do, by a ticket; the others stop at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.brokers.embedded import EmbeddedBroker
from airflow_delay_provider.operators.spark import HISTORY_KEY
from tests.acceptance.runs import DEFERRED, Run
from tests.servers.airflow import Airflow
from tests.servers.airflow_api import AirflowApi
from tests.servers.process import free_port
from tests.sparks import JOBS, running_with

pytestmark = pytest.mark.timeout(600)

SECONDS = 240
ENDED = frozenset({"success", "failed"})
RECOVERING = JOBS / "recovering.py"
#: Programs that never run better, by the rule that tells so.
MISTAKES = {
    "missing-module": "import a_module_that_nobody_has\n",
    "python-syntax": "print('never'\n",
    "missing-path": "from pyspark.sql import SparkSession\nSparkSession.builder.getOrCreate().read.json('/nowhere')\n",
    "analysis": "from pyspark.sql import SparkSession\nSparkSession.builder.getOrCreate().range(3).select('price')\n",
}


@dataclass(frozen=True)
class Job:
    """One job that runs in Airflow."""

    run: Run
    folder: Path

    def wait_until_deferred(self) -> None:
        self.run.api.wait_for_task(self.run.dag_id, self.run.run_id, "job", DEFERRED | ENDED, seconds=SECONDS)
        assert self.run.task("job")["state"] == "deferred", self.history()

    def wait(self) -> str:
        return self.run.api.wait_for_run(self.run.dag_id, self.run.run_id, seconds=SECONDS)

    def mend(self) -> None:
        (self.folder / "mended").touch()

    def history(self) -> Any:
        path = f"/api/v2/dags/{self.run.dag_id}/dagRuns/{self.run.run_id}/taskInstances/job/state-store/{HISTORY_KEY}"
        return self.run.api.get(path)["value"]

    def verdicts(self) -> list[str | None]:
        return [attempt["verdict"] for attempt in self.history()["attempts"]]

    def submissions(self) -> int:
        written = self.folder / "submissions"
        return len(written.read_text().splitlines()) if written.exists() else 0


Begin = Callable[..., Job]


@pytest.fixture(scope="module")
def begin(airflow: Airflow, api: AirflowApi, tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """Start a job: ``begin("source")``."""
    define(api, "spark_local", {"conn_type": "spark", "host": "local[1]"})

    def begin_job(way: str, *, dag_id: str = "spark_local", application: Path = RECOVERING) -> Job:
        folder = tmp_path_factory.mktemp(way)
        api.wait_for_dag(dag_id)
        arguments = {"application": str(application), "arguments": [way, str(folder)]}
        return Job(Run(api, dag_id, api.trigger(dag_id, arguments)), folder)

    return begin_job


def define(api: AirflowApi, conn_id: str, connection: dict[str, Any]) -> None:
    """Define a connection in Airflow's database, anew."""
    api.http.delete(f"/api/v2/connections/{conn_id}")
    body = connection | {"connection_id": conn_id, "extra": json.dumps(connection.get("extra", {}))}
    api.http.post("/api/v2/connections", json=body).raise_for_status()


@contextmanager
def source(port: int) -> Iterator[None]:
    """A source of data that listens on this port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"orders")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


# -- what may recover ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recovered(begin: Begin) -> Iterator[dict[str, Job]]:
    """Jobs that failed once, of which the cause was mended while they waited."""
    jobs = {way: begin(way) for way in ("source", "disk", "memory", "shuffle")}
    port = free_port()
    (jobs["source"].folder / "port").write_text(str(port))
    (jobs["disk"].folder / "disk").symlink_to("/dev/full")
    for job in jobs.values():
        job.wait_until_deferred()
    (jobs["disk"].folder / "disk").unlink()
    with source(port):
        for job in jobs.values():
            job.mend()
        for job in jobs.values():
            job.wait()
        yield jobs


@pytest.mark.parametrize(
    ("way", "verdict"),
    [("source", "transient"), ("disk", "resource"), ("memory", "resource"), ("shuffle", "infrastructure")],
)
def test_a_job_whose_failure_may_pass_is_submitted_again_and_succeeds(
    recovered: dict[str, Job], way: str, verdict: str
) -> None:
    job = recovered[way]
    assert job.run.task("job")["state"] == "success", job.history()
    assert job.verdicts()[-1] is None
    # The cause may have been there for one more submission before the test mended it.
    assert set(job.verdicts()[:-1]) == {verdict}
    assert job.submissions() == len(job.verdicts())
    assert job.run.task("job")["try_number"] == 1


# -- what will not -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mistaken(begin: Begin, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs that have failed for good."""
    programs = tmp_path_factory.mktemp("programs")
    jobs = {}
    for name, program in MISTAKES.items():
        (programs / f"{name}.py").write_text(program)
        jobs[name] = begin(name, application=programs / f"{name}.py")
    for job in jobs.values():
        job.wait()
    return jobs


@pytest.mark.parametrize("name", MISTAKES)
def test_a_job_that_would_fail_again_fails_at_the_first_attempt_with_the_reason_in_one_line(
    mistaken: dict[str, Job], name: str
) -> None:
    job = mistaken[name]
    assert job.run.task("job")["state"] == "failed"
    assert job.run.task("job")["try_number"] == 1
    assert job.verdicts() == ["permanent"]
    log = job.run.log("job")
    assert "the Spark job failed at attempt 1 (permanent)" in log
    assert job.history()["attempts"][0]["reason"] in log


# -- while it waits ------------------------------------------------------------------------------------------------


def test_a_waiting_task_takes_no_slot_no_jvm_and_can_be_expedited_and_given_up(
    begin: Begin, airflow: Airflow, api: AirflowApi, broker: EmbeddedBroker
) -> None:
    jobs = [begin("source") for _ in range(2)]
    for job in jobs:
        (job.folder / "port").write_text(str(free_port()))
    for job in jobs:
        job.wait_until_deferred()
    airflow.wait_for(lambda: api.pool()["occupied_slots"] == 0, what="no worker slot is taken", seconds=60)
    assert [running_with(str(job.folder)) for job in jobs] == [[], []]
