"""Spark attempts that are tasks of their own, in a real Airflow with real jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from demo.orders_server import orders_server, orders_url
from tests.acceptance.runs import DEFERRED, Run
from tests.sparks import running_with
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi
from tools.servers.process import free_port

pytestmark = pytest.mark.timeout(600)

SECONDS = 240
JOB = Path(__file__).parents[2] / "dags" / "jobs" / "count_orders.py"


@pytest.fixture(scope="module")
def spark_local(api: AirflowApi) -> None:
    """Where the groups submit to."""
    api.http.delete("/api/v2/connections/spark_local")
    body = {"connection_id": "spark_local", "conn_type": "spark", "host": "local[1]"}
    api.http.post("/api/v2/connections", json=body).raise_for_status()


def begin(api: AirflowApi, **params: Any) -> Run:
    api.wait_for_dag("spark_group")
    return Run(api, "spark_group", api.trigger("spark_group", params))


def states(run: Run) -> dict[str, str]:
    return {task_id.removeprefix("orders."): state for task_id, state in run.states().items()}


def wait_until_deferred(run: Run, task_id: str) -> None:
    ended = frozenset({"failed", "success", "skipped", "upstream_failed"})
    task = run.api.wait_for_task(run.dag_id, run.run_id, task_id, DEFERRED | ended, seconds=SECONDS)
    assert task["state"] == "deferred", run.states()


def wait(run: Run, state: str) -> None:
    assert run.api.wait_for_run(run.dag_id, run.run_id, seconds=SECONDS) == state, run.states()


@pytest.mark.usefixtures("spark_local")
def test_an_attempt_that_fails_transiently_is_followed_by_another_when_its_message_comes(
    airflow: Airflow, api: AirflowApi, broker: EmbeddedBroker
) -> None:
    port = free_port()
    run = begin(api, application=str(JOB), source=orders_url(port))
    wait_until_deferred(run, "orders.wait_2")
    airflow.wait_for(lambda: api.pool()["occupied_slots"] == 0, what="no worker slot is taken", seconds=60)
    assert running_with(orders_url(port)) == []

    with orders_server(port):
        broker.expedite([run.result("orders.schedule_2")])
        wait(run, "success")
    assert states(run) == {
        "submit_1": "failed",
        "schedule_2": "success",
        "wait_2": "success",
        "submit_2": "success",
        "schedule_3": "skipped",
        "wait_3": "skipped",
        "submit_3": "skipped",
        "outcome": "success",
        "after": "success",
    }
    assert run.result("orders.outcome") == 2
    assert "the Spark job failed (transient)" in run.log("orders.submit_1")
    assert "orders paid: 667" in run.log("orders.submit_2")


@pytest.mark.usefixtures("spark_local")
def test_a_permanent_failure_ends_the_group_at_once_with_the_reason_in_one_line(
    api: AirflowApi, tmp_path: Path
) -> None:
    job = tmp_path / "mistaken.py"
    job.write_text("import a_module_that_does_not_exist\n")
    run = begin(api, application=str(job), source="none")
    wait(run, "failed")
    skipped = dict.fromkeys(("schedule_2", "wait_2", "submit_2", "schedule_3", "wait_3", "submit_3"), "skipped")
    assert states(run) == {"submit_1": "failed", **skipped, "outcome": "failed", "after": "upstream_failed"}
    log = run.log("orders.outcome")
    assert "the Spark job failed at attempt 1 (permanent): " in log
    assert "a_module_that_does_not_exist" in log
    assert "not tried again: it would fail again" in log


@pytest.mark.usefixtures("spark_local")
def test_a_retry_that_is_given_up_ends_the_group(api: AirflowApi, broker: EmbeddedBroker) -> None:
    run = begin(api, application=str(JOB), source=orders_url(free_port()))
    wait_until_deferred(run, "orders.wait_2")
    broker.cancel([run.result("orders.schedule_2")])
    wait(run, "failed")
    assert "the retry was given up" in run.log("orders.wait_2")
    assert {name: state for name, state in states(run).items() if state in ("success", "failed")} == {
        "submit_1": "failed",
        "schedule_2": "success",
        "wait_2": "failed",
        "outcome": "failed",
    }
    assert "attempt 2 was given up" in run.log("orders.outcome")


@pytest.mark.usefixtures("spark_local")
def test_an_attempt_that_a_user_ends_ends_the_group_and_leaves_no_process(
    airflow: Airflow, api: AirflowApi, tmp_path: Path
) -> None:
    job = tmp_path / "sleeping.py"
    job.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(600)\n")
    run = begin(api, application=str(job), source=str(tmp_path / "begun"))
    airflow.wait_for((tmp_path / "begun").exists, what="the job runs", seconds=SECONDS)
    api.mark(run.dag_id, run.run_id, "orders.submit_1", "failed")
    wait(run, "failed")
    airflow.wait_for(lambda: running_with(str(job)) == [], what="nothing of the job is left", seconds=60)
    assert states(run)["schedule_2"] == states(run)["submit_2"] == "skipped"
    assert "the task was stopped" in run.log("orders.outcome")
