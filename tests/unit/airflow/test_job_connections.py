"""Airflow connections that a task hands to its Spark job, and where their secrets must not appear."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.operators.spark import SparkSubmitRetryOperator
from airflow_delay_provider.spark.connection import LEDGER_URL
from airflow_delay_provider.spark.process.job_environment import find_job_environment
from airflow_delay_provider.spark.retries import HISTORY_KEY
from tests.unit.airflow.submitting import SparkSubmit
from tests.unit.airflow.test_spark_operator import Task
from tests.unit.airflow.tickets import tickets_in

SECRET = "planted-s3cret"
RABBITMQ = {
    "conn_type": "rabbitmq",
    "host": "rabbit.example",
    "port": 5671,
    "login": "airflow",
    "password": f"{SECRET}-password: \"'$ äö\n%",
    "extra": {"hold": "ledger", "ledger_url": f"postgresql+psycopg://delay:{SECRET}-in-url@db.example/ledger"},
}
KAFKA = {
    "conn_type": "delay_kafka",
    "host": "kafka.example:9092",
    "extra": {"sasl.username": "airflow", "sasl.password": f"{SECRET}-kafka"},
}
#: Writes what it got where no log sees it.
KEEP_ENVIRONMENT = "env -0 > environment"
#: A job that prints everything it has, also in the exception that ends it.
TELL_TALE = (
    "env; printf '%%s\n' \"Caused by: java.net.ConnectException: Connection refused $(env | tr '\n' ' ')\";"
    ' for word in %s; do echo "ERROR: Connection refused with $word"; done; exit 1'
)


@pytest.fixture
def task(tmp_path: Path, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "local[1]"}))
    return Task(tmp_path)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Connections that only the task can look up: not one of its environment, which every process inherits."""
    defined = {"orders_rabbitmq": RABBITMQ, "orders_kafka": KAFKA}
    from airflow.sdk import BaseHook

    look_up = BaseHook.get_connection

    def get_connection(conn_id: str) -> Connection:
        if conn_id in defined:
            return Connection.from_json(json.dumps(defined[conn_id]), conn_id=conn_id)
        return look_up(conn_id)

    monkeypatch.setattr(BaseHook, "get_connection", staticmethod(get_connection))
    return list(defined)


def environment_of(program: SparkSubmit) -> dict[str, str]:
    entries = Path(program.path).with_name("environment").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def test_a_job_gets_the_connections_in_the_environment_of_spark_submit(
    task: Task, secrets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEDGER_URL, "postgresql+psycopg://delay@db.example/ledger")
    task.program.plan(KEEP_ENVIRONMENT)
    task.options = {"job_connections": secrets, "env_vars": {"REGION": "north"}}
    task.begin()
    got = environment_of(task.program)
    for name, given in (("AIRFLOW_CONN_ORDERS_RABBITMQ", RABBITMQ), ("AIRFLOW_CONN_ORDERS_KAFKA", KAFKA)):
        connection = Connection.from_json(got[name])
        assert json.loads(connection.as_json()) == given
    assert got["REGION"] == "north"
    assert got[LEDGER_URL] == "postgresql+psycopg://delay@db.example/ledger"
    assert SECRET not in Path(task.program.path).with_name("submitted").read_text()


def test_a_job_without_job_connections_gets_none(task: Task, secrets: list[str]) -> None:
    task.program.plan(KEEP_ENVIRONMENT)
    task.begin()
    assert {f"AIRFLOW_CONN_{each.upper()}" for each in secrets}.isdisjoint(environment_of(task.program))


def test_commands_after_the_submission_do_not_get_them(task: Task, secrets: list[str], tmp_path: Path) -> None:
    task.options = {"job_connections": secrets, "post_submit_commands": [f"sh -c 'env > {tmp_path}/after'"]}
    task.begin()
    assert SECRET not in (tmp_path / "after").read_text()


def test_a_planted_secret_that_the_job_prints_is_found_nowhere(
    task: Task,
    secrets: list[str],
    broker: EmbeddedBroker,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    words = f"{SECRET}-in-url {SECRET}-kafka"
    task.program.plan(TELL_TALE % words, TELL_TALE % words, "echo 'ModuleNotFoundError: No module named x'; exit 1")
    task.options = {"job_connections": secrets}
    assert task.begin() is not None
    [ticket] = tickets_in(broker)
    trigger = task.resume()
    assert trigger is not None
    with pytest.raises(AirflowFailException) as failed:
        task.resume()
    printed = capfd.readouterr()
    kept: dict[str, Any] = {
        "output": printed.out + printed.err,
        "log": caplog.text,
        "history": json.dumps(task.store.get(HISTORY_KEY)),
        "ticket": str(ticket),
        "trigger": str(trigger.serialize()),
        "XCom": str(task.ti.pushed),
        "error": f"{failed.value!r} {failed.value.__context__!r}",
        "operator": str(vars(task.operator())),
    }
    assert "connection-refused" in kept["history"]
    assert "with ***" in kept["output"] + kept["log"]
    for name, text in kept.items():
        assert [line for line in text.splitlines() if SECRET in line] == [], name


def test_ids_are_no_template_and_not_rendered() -> None:
    assert "job_connections" not in SparkSubmitRetryOperator.template_fields


def test_the_environment_shows_no_secret_in_its_repr(secrets: list[str]) -> None:
    assert SECRET not in repr(find_job_environment(secrets))


@pytest.mark.parametrize(
    ("extra", "options"),
    [({"deploy-mode": "cluster"}, {}), ({}, {"conf": {"spark.submit.deployMode": "cluster"}})],
)
def test_a_job_in_cluster_mode_is_refused_with_the_alternative_before_it_is_submitted(
    task: Task, extra: dict[str, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = {"conn_type": "spark", "host": "yarn", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(spark))
    task.options = {"job_connections": ["delay_default"], "durable": False, **options}
    with pytest.raises(ConfigurationError, match=r"job_connections: .*files=FILE.*--connection-file"):
        task.begin()
    assert task.program.submissions == 0


def test_cluster_mode_is_refused_when_the_dag_is_parsed_if_the_task_says_so() -> None:
    with pytest.raises(ConfigurationError, match="job_connections: the driver"):
        SparkSubmitRetryOperator(task_id="load", job_connections=["delay_default"], deploy_mode="cluster")


@pytest.mark.parametrize("given", ["delay_default", [""], [None]])
def test_what_is_no_list_of_ids_is_refused_when_the_dag_is_parsed(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"job_connections: .* is not a list of connection ids"):
        SparkSubmitRetryOperator(task_id="load", job_connections=given)


def test_a_connection_that_is_not_defined_fails_the_task_before_anything_is_submitted(task: Task) -> None:
    task.options = {"job_connections": ["orders_kafka"]}
    with pytest.raises(ConfigurationError, match="job_connections: connection 'orders_kafka' is not defined"):
        task.begin()
    assert task.program.submissions == 0
    task.options = {}
    assert task.begin_next_try() is None
    assert [attempt.verdict for attempt in task.history.attempts] == [None]


def test_the_default_connection_need_not_be_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_DELAY_DEFAULT", raising=False)
    monkeypatch.setenv(LEDGER_URL, f"postgresql+psycopg://delay:{SECRET}@db.example/ledger")
    found = find_job_environment(["delay_default"])
    assert found.variables == {
        "AIRFLOW_CONN_DELAY_DEFAULT": '{"conn_type": "delay"}',
        LEDGER_URL: f"postgresql+psycopg://delay:{SECRET}@db.example/ledger",
    }
    assert found.hide_secrets(f"no route to delay:{SECRET}@db") == "no route to delay:***@db"


def test_each_attempt_looks_up_the_connections_again(
    task: Task, secrets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password may have been changed while the task waited."""
    task.program.plan("echo 'Caused by: java.net.ConnectException: Connection refused'; exit 1", KEEP_ENVIRONMENT)
    task.options = {"job_connections": secrets}
    with pytest.raises(TaskDeferred):
        task.operator().execute(task.context)
    monkeypatch.setitem(RABBITMQ, "password", f"{SECRET}-changed")
    assert task.resume() is None
    assert f"{SECRET}-changed" in environment_of(task.program)["AIRFLOW_CONN_ORDERS_RABBITMQ"]


def test_the_driver_of_a_job_needs_no_airflow_for_what_its_task_has_looked_up(tmp_path: Path) -> None:
    """In the environment of a task, a new process cannot import Airflow: its database is not allowed there."""
    extra = {"ledger_url": f"sqlite:///{tmp_path}/ledger.db"}
    given = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "airflow-db-not-allowed:///",
        LEDGER_URL: f"sqlite:///{tmp_path}/configured.db",
        "AIRFLOW_CONN_DELAY_DEFAULT": '{"conn_type": "delay"}',
        "AIRFLOW_CONN_OTHER": json.dumps({"conn_type": "delay", "extra": json.dumps(extra)}),
    }
    program = """
import sys
from airflow_delay_provider.spark.connection import find_job_connection
for name in (None, "other"):
    print(find_job_connection(name).ledger_file)
assert "airflow" not in sys.modules
try:
    find_job_connection("nowhere")
except Exception as error:
    print(error)
"""
    environment = {**os.environ, **given}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{tmp_path}/configured.db",
        f"{tmp_path}/ledger.db",
        "connection: 'nowhere' is not in the environment of this job, and no secrets backend has it; add it to"
        " job_connections of the task",
    ], done.stderr
