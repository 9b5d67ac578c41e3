"""Whole DAGs through ``airflow dags test``, with a dispatcher process beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]

WAITING_DAG = """
from airflow.sdk import DAG, task
from airflow_delay_provider import (
    CancelMessageOperator,
    MessageDispatchedSensor,
    MessageSensor,
    ScheduleMessageOperator,
)

with DAG("waiting", schedule=None, default_args={"delay_conn_id": "delay_of_the_metadatabase"}):
    one = ScheduleMessageOperator(
        task_id="one", channel="answers", payload={"n": 1}, deliver_after=2, wait_for_dispatch=True
    )
    many = ScheduleMessageOperator.partial(task_id="many", channel="answers", deliver_after=2).expand(
        payload=["a", "b"]
    )
    sent = MessageDispatchedSensor(task_id="sent", message_ids=many.output)
    answer = MessageSensor(task_id="answer", channel="later", timeout=180)

    @task.schedule_message(channel="later", deliver_after=1)
    def ask() -> dict:
        return {"answer": 42}

    @task
    def check(one_id, many_ids, answer):
        print("CHECKED", len(one_id), len(set(many_ids)), answer["payload"])

    one >> many >> sent
    asked = ask()
    asked >> answer
    never = ScheduleMessageOperator(task_id="never", channel="answers", payload=None, deliver_after=3600)
    CancelMessageOperator(task_id="cancel", message_ids=never.output)
    sent >> check(one.output, many.output, answer.output)
"""


FORGOTTEN_DAG = """
from airflow.sdk import DAG
from airflow_delay_provider import ScheduleMessageOperator

with DAG("forgotten", schedule=None, default_args={"delay_conn_id": "delay_without_dispatcher"}):
    later = ScheduleMessageOperator(task_id="later", channel="answers", payload=None, deliver_after=3600)
    ScheduleMessageOperator(
        task_id="waits",
        channel="answers",
        payload=None,
        deliver_after=1,
        wait_for_dispatch=True,
        wait_timeout="{{ 11 + 1 }}",
    )
"""


@pytest.fixture(scope="module")
def dags_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Run one DAG in an Airflow of its own and return the log."""
    home = tmp_path_factory.mktemp("airflow")
    (home / "dags").mkdir()
    (home / "dags" / "waiting.py").write_text(WAITING_DAG)
    (home / "dags" / "forgotten.py").write_text(FORGOTTEN_DAG)
    for example in ("example_delayed_message", "example_consume"):
        shutil.copy(ROOT / "dags" / f"{example}.py", home / "dags")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")},
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def airflow(*arguments: str, fails: bool = False) -> str:
        done = subprocess.run(
            ["airflow", *arguments], env=environment, cwd=home, capture_output=True, text=True, timeout=240
        )
        assert bool(done.returncode) == fails, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout + done.stderr

    airflow("db", "migrate")
    # Not in the environment: the trigger has to ask Airflow for it.
    extra = f'{{"ledger_url": "sqlite:///{home}/delay.db"}}'
    airflow("connections", "add", "delay_of_the_metadatabase", "--conn-type", "delay", "--conn-extra", extra)
    other = {"conn_type": "delay", "extra": {"ledger_url": f"sqlite:///{home}/other.db"}}
    environment["AIRFLOW_CONN_DELAY_WITHOUT_DISPATCHER"] = json.dumps(other)
    airflow("dags", "reserialize")
    dispatcher = subprocess.Popen(
        [sys.executable, "-m", "airflow_delay_provider.dispatcher", "--health-port", "-1"],
        env=environment,
        cwd=home,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield lambda *arguments, **options: airflow("dags", "test", *arguments, **options)
    dispatcher.terminate()
    assert dispatcher.wait(timeout=30) == 0


def test_tasks_wait_and_go_on(dags_test: Callable[..., str]) -> None:
    """A40, B51: from the operator through the dispatcher to the sensor."""
    log = dags_test("waiting")

    assert "CHECKED 36 2 {'answer': 42}" in log
    assert "Cancelled 1 messages, too late for 0" in log


def test_the_example_of_a_delayed_message_runs(dags_test: Callable[..., str]) -> None:
    log = dags_test("example_delayed_message", "2025-06-01")

    assert "scheduled 0, dispatched 1, kept 0, replaced 0; due 2025-06-01T09:00:00+00:00" in log
    assert "The figures were announced with message" in log


def test_the_example_of_consuming_runs(dags_test: Callable[..., str]) -> None:
    """A1, A23, A25"""
    log = dags_test("example_consume")

    assert log.count("printed the invoice") == log.count("printed the poster") == 1
    assert "KeyError: 'print'" in log


def test_a_forgotten_dispatcher_is_named_in_the_log_and_ends_the_wait(dags_test: Callable[..., str]) -> None:
    """B41: by the task that schedules, by the trigger that waits, and by the task that has waited long enough."""
    log = dags_test("forgotten", fails=True)

    command = "start one with `airflow delay dispatcher --conn-id delay_without_dispatcher`"
    missing = f"no dispatcher has ever been seen in this ledger; {command}"
    assert log.count(f"The messages are scheduled, but nothing dispatches them: {missing}") == 2
    assert log.count(f"Nothing dispatches the messages that this task waits for: {missing}") == 1
    assert "wait_timeout: 1 of 1 messages were not dispatched within 12 s (" in log
    assert "they stay scheduled, and a retry of this task waits for them again" in log
