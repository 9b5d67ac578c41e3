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

import psutil
import pytest
from sqlalchemy import text

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.spark.process import guard
from airflow_delay_provider.spark.retries import HISTORY_KEY
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, Ticket, WaitsFor
from tests.acceptance.runs import DEFERRED, Run
from tests.sparks import JOBS, connection_of, private_cluster, running_with
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi
from tools.servers.component import Component, wait_for
from tools.servers.process import free_port
from tools.servers.spark import SparkCluster

pytestmark = pytest.mark.timeout(600)

SECONDS = 240
ENDED = frozenset({"success", "failed"})
RECOVERING = JOBS / "recovering.py"
#: Programs that never run better, one in Python and one in the JVM; tests/spark_corpus has logs of many more.
MISTAKES = {
    "missing-module": "import a_module_that_does_not_exist\n",
    "analysis": "from pyspark.sql import SparkSession\nSparkSession.builder.getOrCreate().range(3).select('price')\n",
}


@dataclass(frozen=True)
class Job:
    """One job that runs in Airflow."""

    run: Run
    folder: Path

    def wait_until_deferred(self) -> None:
        task = self.run.api.wait_for_task(self.run.dag_id, self.run.run_id, "job", DEFERRED | ENDED, seconds=SECONDS)
        assert task["state"] == "deferred", self.history()

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
Prepare = Callable[[Path], object]


@pytest.fixture(scope="module")
def begin(airflow: Airflow, api: AirflowApi, tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """Start a job: ``begin("source", prepare=reading_from(port))``."""
    define(api, "spark_local", {"conn_type": "spark", "host": "local[1]"})

    def begin_job(
        way: str, *, dag_id: str = "spark_local", application: Path = RECOVERING, prepare: Prepare = lambda _: None
    ) -> Job:
        folder = tmp_path_factory.mktemp(way)
        prepare(folder)
        api.wait_for_dag(dag_id)
        arguments = {"application": str(application), "arguments": [way, str(folder)]}
        return Job(Run(api, dag_id, api.trigger(dag_id, arguments)), folder)

    return begin_job


def reading_from(port: int) -> Prepare:
    """Prepare a job that reads a source there."""
    return lambda folder: (folder / "port").write_text(str(port))


def define(api: AirflowApi, conn_id: str, connection: dict[str, Any]) -> None:
    """Define or replace a connection in Airflow's database."""
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


# -- transient failures --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recovered(begin: Begin) -> Iterator[dict[str, Job]]:
    """Jobs that failed once, and whose cause was repaired while they waited."""
    port = free_port()
    jobs = {
        "source": begin("source", prepare=reading_from(port)),
        "disk": begin("disk", prepare=lambda folder: (folder / "disk").symlink_to("/dev/full")),
    }
    for job in jobs.values():
        job.wait_until_deferred()
    (jobs["disk"].folder / "disk").unlink()
    with source(port):
        for job in jobs.values():
            job.mend()
        for job in jobs.values():
            job.wait()
        yield jobs


@pytest.mark.parametrize(("way", "verdict"), [("source", "transient"), ("disk", "resource")])
def test_a_job_whose_failure_may_pass_is_submitted_again_and_succeeds(
    recovered: dict[str, Job], way: str, verdict: str
) -> None:
    """M2"""
    job = recovered[way]
    assert job.run.task("job")["state"] == "success", job.history()
    assert job.verdicts()[-1] is None
    # The cause may have failed one more submission before the test removed it.
    assert set(job.verdicts()[:-1]) == {verdict}
    assert job.submissions() == len(job.verdicts())
    assert job.run.task("job")["try_number"] == 1


# -- permanent failures --------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def patient(begin: Begin) -> list[Job]:
    """Four jobs whose tickets are due in an hour."""
    jobs = [begin("source", dag_id="spark_patient", prepare=reading_from(free_port())) for _ in range(4)]
    for job in jobs:
        job.wait_until_deferred()
    return jobs


def test_waiting_tasks_take_no_slot_no_process_and_no_connection_of_their_own(
    patient: list[Job], airflow: Airflow, api: AirflowApi, broker: EmbeddedBroker
) -> None:
    """M3"""
    airflow.wait_for(lambda: api.pool()["occupied_slots"] == 0, what="no worker slot is taken", seconds=60)
    assert [running_with(str(job.folder)) for job in patient] == [[], [], [], []]
    # One for the journal and one for admission, however many wait.
    assert connections_to_ledger(airflow.components["triggerer"], broker) <= 2


def connections_to_ledger(component: Component, broker: EmbeddedBroker) -> int:
    """How many connections to the ledger's database a component has."""
    ports = [each.laddr.port for pid in component.pids() for each in psutil.Process(pid).net_connections("tcp")]
    of_ports = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND client_port = ANY(:ports)"
    with broker.ledger.read() as connection:
        return int(connection.execute(text(of_ports), {"ports": ports}).scalar_one())


def test_tickets_are_listed_expedited_and_given_up(
    patient: list[Job], airflow: Airflow, api: AirflowApi, broker: EmbeddedBroker
) -> None:
    expedited, given_up, *marked = patient
    listed = {each["run_id"]: each for each in retries(airflow)["retries"]}
    ticket = listed[expedited.run.run_id]
    assert (ticket["attempt"], ticket["verdict"], ticket["waits_for"]) == (2, "transient", "backoff")
    assert "refused" in ticket["reason"]

    for job, state in zip(marked, ("failed", "success"), strict=True):
        airflow.wait_for(lambda job=job: job.run.is_with_triggerer("job"), what="a triggerer has it", seconds=60)
        api.mark(job.run.dag_id, job.run.run_id, "job", state)
    with source(int((expedited.folder / "port").read_text())):
        retries(airflow, "--run-id", expedited.run.run_id, "--expedite")
        retries(airflow, "--run-id", given_up.run.run_id, "--give-up", "--yes")
        assert expedited.wait() == "success"
    assert expedited.submissions() == 2
    assert given_up.wait() == "failed"
    assert given_up.submissions() == 1
    assert "it was given up" in given_up.run.log("job")

    def ended() -> bool:
        with broker.ledger.read() as connection:
            states = {listing.get(connection, listed[job.run.run_id]["message_id"]).state for job in marked}
        return states == {State.CANCELLED}

    airflow.wait_for(ended, what="the tickets of tasks that a user ended are cancelled", seconds=60)
    assert retries(airflow)["retries"] == []


def retries(airflow: Airflow, *arguments: str) -> Any:
    return json.loads(airflow.run("airflow", "delay", "retries", "--output", "json", *arguments))


# -- killed processes ----------------------------------------------------------------------------------------------


def test_a_job_whose_airflow_worker_is_killed_is_ended_with_it_and_submitted_again(begin: Begin) -> None:
    """M4"""
    job = begin("work")
    wait_for(lambda: (job.folder / "working").exists(), what="the job works", seconds=SECONDS)
    task_process_of(job).kill()
    wait_for(lambda: job.submissions() == 2, what="it is submitted again", seconds=SECONDS)
    job.mend()
    assert job.wait() == "success"
    assert job.verdicts() == ["infrastructure", None]
    assert job.submissions() == 2
    assert not (job.folder / "overlaps").exists(), "two drivers ran at the same time"


def task_process_of(job: Job) -> psutil.Process:
    """The process of the task, which has started the guard of spark-submit."""
    guards = [each for each in running_with(str(job.folder)) if guard.__file__ in each.cmdline()]
    assert len(guards) == 1, guards
    parent = guards[0].parent()
    assert parent is not None
    return parent


def test_a_triggerer_that_is_killed_while_tickets_wait_loses_none(begin: Begin, airflow: Airflow) -> None:
    """M4"""
    port = free_port()
    job = begin("source", prepare=reading_from(port))
    job.wait_until_deferred()
    triggerer = airflow.components["triggerer"]
    triggerer.kill()
    with source(port):
        triggerer.start()
        assert job.wait() == "success"
    assert set(job.verdicts()[:-1]) == {"transient"}
    assert job.submissions() == len(job.verdicts())
    assert not (job.folder / "overlaps").exists()


# -- a cluster that fails ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(api: AirflowApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    """A master and a worker, known to Airflow."""
    with private_cluster(tmp_path_factory.mktemp("spark"), cores=2) as started:
        define(api, "spark_standalone", connection_of(started))
        yield started


def waits_for_cluster(broker: EmbeddedBroker, job: Job) -> bool:
    with broker.ledger.read() as connection:
        waiting = listing.page(connection, channel=DEFAULT_CHANNEL, states=[State.SCHEDULED]).records
        messages = [listing.get(connection, each.message.id).message for each in waiting]
    tickets = [ticket for message in messages if (ticket := Ticket.from_message(message)) is not None]
    return any(ticket.origin.run_id == job.run.run_id and ticket.waits_for is WaitsFor.CLUSTER for ticket in tickets)


def test_a_job_that_lost_the_only_worker_is_ended_waits_for_another_and_succeeds(
    begin: Begin, cluster: SparkCluster, broker: EmbeddedBroker
) -> None:
    """M4"""
    job = begin("work", dag_id="spark_standalone")
    wait_for(lambda: (job.folder / "working").exists(), what="the job works", seconds=SECONDS)
    cluster.kill_worker()
    wait_for(lambda: waits_for_cluster(broker, job), what="its ticket waits for the cluster", seconds=SECONDS)
    job.mend()
    cluster.start_worker()
    assert job.wait() == "success"
    assert job.verdicts() == ["infrastructure", None]
    assert job.submissions() == 2


def test_no_task_submits_while_the_master_is_down_and_all_do_when_it_is_back(
    begin: Begin, cluster: SparkCluster, broker: EmbeddedBroker
) -> None:
    """M4"""
    cluster.kill_worker()
    cluster.kill_master()
    first = begin("work", dag_id="spark_standalone")
    wait_for(lambda: waits_for_cluster(broker, first), what="its ticket waits for the cluster", seconds=SECONDS)
    second = begin("work", dag_id="spark_standalone")
    wait_for(lambda: waits_for_cluster(broker, second), what="the other one waits too", seconds=SECONDS)
    assert second.submissions() == 0
    first.mend()
    second.mend()
    cluster.start_master()
    cluster.start_worker()
    assert (first.wait(), second.wait()) == ("success", "success")
    assert first.verdicts() == ["infrastructure", None]
    assert second.verdicts() == [None]
    assert (first.submissions(), second.submissions()) == (2, 1)
