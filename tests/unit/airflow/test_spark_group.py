"""A group of Spark attempts, task by task: what each one does with the result of the one before."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.sensors.spark import DelayedRetrySensor
from airflow_delay_provider.spark import group as spark_group
from airflow_delay_provider.spark.group import HISTORY_XCOM_KEY, spark_submit_with_retries, states_of

REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
MISTAKE = "ModuleNotFoundError: No module named 'shop'"
#: Drawn from a narrow band, so that the growth shows whatever is drawn.
BACKOFF = Backoff(initial=timedelta(minutes=10), factor=4, cap=timedelta(hours=8), floor=timedelta(minutes=9))
Dispatch = Callable[..., int]


@dataclass
class TaskInstance:
    """What the tasks of a group ask of a task instance, with the tables of a run behind it."""

    scene: Scene
    task_id: str
    dag_id: str = "shop"
    run_id: str = "manual__2030-01-01"
    map_index: int = -1

    def xcom_push(self, key: str, value: Any) -> None:
        # Through JSON, as Airflow stores it.
        self.scene.xcoms[self.task_id, key] = json.loads(json.dumps(value))

    def xcom_pull(self, task_ids: str, key: str = "return_value") -> Any:
        return self.scene.xcoms.get((task_ids, key))

    def get_task_states(self, *, task_ids: list[str], run_ids: list[str], **_: Any) -> dict[str, dict[str, str]]:
        # Airflow adds the index to the names of mapped tasks.
        suffix = "" if self.map_index < 0 else f"_{self.map_index}"
        known = {f"{name}{suffix}": self.scene.states[name] for name in task_ids if name in self.scene.states}
        return dict.fromkeys(run_ids, known)


@dataclass
class Scene:
    """One run of a group, whose tasks a test runs in the order that Airflow would."""

    dag: DAG
    spark_submit: Path
    xcoms: dict[tuple[str, str], Any] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    said: str = ""

    def submission_says(self, *lines: str, code: int = 1) -> None:
        """Let the next submissions print this, as a job does, and end so."""
        printed = "\n".join(f"echo {json.dumps(line)}" for line in lines)
        self.spark_submit.write_text(f"#!/bin/sh\n{printed}\nexit {code}\n")
        self.spark_submit.chmod(0o755)

    def run(self, name: str, event: dict[str, Any] | None = None) -> str:
        """Run a task, or resume it with an event, and return the state that Airflow would give it."""
        task: Any = self.dag.get_task(f"orders.{name}")
        context: Any = {"ti": TaskInstance(self, task.task_id)}
        try:
            result = task.execute(context) if event is None else task.execute_complete(context, event)
        except AirflowSkipException as skipped:
            state, self.said = "skipped", str(skipped)
        except AirflowFailException as failed:
            state, self.said = "failed", str(failed)
        except TaskDeferred as deferred:
            state, self.trigger = "deferred", deferred.trigger
        else:
            state = "success"
            self.xcoms[task.task_id, "return_value"] = result
        self.states[task.task_id] = state
        return state

    def resume(self, name: str) -> str:
        """Let the trigger of a deferred task fire."""

        async def fire() -> Any:
            return (await asyncio.wait_for(anext(self.trigger.run()), 60)).payload

        return self.run(name, asyncio.run(fire()))

    def result(self, name: str, key: str = "return_value") -> Any:
        return self.xcoms[f"orders.{name}", key]


@pytest.fixture
def scene(tmp_path: Path, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_LOCAL", json.dumps({"conn_type": "spark", "host": "local[1]"}))
    with DAG("shop", schedule=None) as dag:
        group = spark_submit_with_retries(
            "orders", attempts=3, backoff=BACKOFF, conn_id="spark_local", application="count_orders.py"
        )
        group >> BaseOperator(task_id="after")
    return Scene(dag, tmp_path / "spark-submit")


@pytest.fixture
def record(broker: EmbeddedBroker) -> Callable[[str], MessageRecord]:
    def look(message_id: str) -> MessageRecord:
        with broker.ledger.read() as connection:
            return listing.get(connection, message_id)

    return look


def traceback(last_line: str) -> list[str]:
    return [
        "Traceback (most recent call last):",
        '  File "count_orders.py", line 7, in <module>',
        "    run()",
        last_line,
    ]


def delay_of(found: MessageRecord) -> timedelta:
    return found.message.deliver_at - found.scheduled_at


# -- the group -----------------------------------------------------------------------------------------------------


def test_only_the_outcome_decides_what_comes_after_the_group(scene: Scene) -> None:
    assert scene.dag.get_task("after").upstream_task_ids == {"orders.outcome"}
    assert scene.dag.get_task("orders.outcome").upstream_task_ids == {
        "orders.submit_1",
        "orders.submit_2",
        "orders.submit_3",
    }
    rules = {task_id: task.trigger_rule.value for task_id, task in scene.dag.task_dict.items()}
    assert {name for name, rule in rules.items() if rule == "all_failed"} == {"orders.schedule_2", "orders.schedule_3"}
    assert {name for name, rule in rules.items() if rule == "all_done"} == {"orders.outcome"}


def test_airflow_can_store_the_group(scene: Scene) -> None:
    stored = DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(scene.dag))))
    assert set(stored.task_dict) == set(scene.dag.task_dict)


@pytest.mark.parametrize("attempts", [0, 11, "3", None])
def test_a_number_of_attempts_that_makes_no_group_is_refused(attempts: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"attempts: .* use 1 to 10"):
        spark_submit_with_retries("orders", attempts=attempts, application="count_orders.py")


# -- an attempt and what follows -----------------------------------------------------------------------------------


def test_a_success_needs_no_other_attempt(scene: Scene) -> None:
    scene.submission_says("orders paid: 7", code=0)
    assert scene.run("submit_1") == "success"
    assert scene.run("outcome") == "success"
    assert scene.result("outcome") == 1


def test_a_failure_that_may_pass_schedules_the_next_attempt_and_the_delay_grows(
    scene: Scene, record: Callable[[str], MessageRecord], dispatch: Dispatch
) -> None:
    scene.submission_says(*traceback(REFUSED))
    assert scene.run("submit_1") == "failed"
    assert scene.said.startswith("the Spark job failed (transient): ")
    assert scene.run("schedule_2") == "success"
    first = record(scene.result("schedule_2"))
    assert timedelta(minutes=9) <= delay_of(first) <= timedelta(minutes=10)

    assert scene.run("wait_2") == "deferred"
    assert dispatch(timedelta(hours=1)) == 1
    assert scene.resume("wait_2") == "success"
    assert scene.run("submit_2") == "failed"
    assert scene.run("schedule_3") == "success"
    second = record(scene.result("schedule_3"))
    assert timedelta(minutes=9) <= delay_of(second) <= timedelta(minutes=40)
    assert [each["verdict"] for each in scene.result("submit_2", HISTORY_XCOM_KEY)["attempts"]] == ["transient"] * 2


def test_the_next_attempt_may_succeed(scene: Scene, dispatch: Dispatch) -> None:
    scene.submission_says(*traceback(REFUSED))
    scene.run("submit_1")
    scene.run("schedule_2")
    scene.run("wait_2")
    dispatch(timedelta(hours=1))
    scene.resume("wait_2")
    scene.submission_says("orders paid: 7", code=0)
    assert scene.run("submit_2") == "success"
    assert scene.run("outcome") == "success"
    assert scene.result("outcome") == 2


def test_a_permanent_failure_is_final_and_explained_in_one_line(scene: Scene, broker: EmbeddedBroker) -> None:
    scene.submission_says(*traceback(MISTAKE))
    assert scene.run("submit_1") == "failed"
    assert scene.run("schedule_2") == "skipped"
    assert scene.run("outcome") == "failed"
    assert scene.said.startswith("the Spark job failed at attempt 1 (permanent): ")
    assert MISTAKE.partition(": ")[2] in scene.said
    assert scene.said.endswith("; not tried again: it would fail again")
    assert "\n" not in scene.said
    with broker.ledger.read() as connection:
        assert listing.page(connection).records == []


def test_when_the_last_attempt_fails_all_are_used_up(scene: Scene, dispatch: Dispatch) -> None:
    scene.submission_says(*traceback(REFUSED))
    for number in (2, 3):
        assert scene.run(f"submit_{number - 1}") == "failed"
        assert scene.run(f"schedule_{number}") == "success"
        assert scene.run(f"wait_{number}") == "deferred"
        dispatch(timedelta(days=1))
        assert scene.resume(f"wait_{number}") == "success"
    assert scene.run("submit_3") == "failed"
    assert scene.run("outcome") == "failed"
    assert scene.said.startswith("the Spark job failed at attempt 3 (transient): ")
    assert scene.said.endswith("; not tried again: all 2 retries (3 attempts) are used up")


def test_a_task_that_cannot_submit_is_wrong_and_not_tried_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {"conn_type": "spark", "host": "local[1]", "extra": {"spark-binary": "rm"}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_LOCAL", json.dumps(connection))
    assert scene.run("submit_1") == "failed"
    assert "nothing was submitted, the task is wrong: " in scene.said
    assert scene.run("schedule_2") == "skipped"


# -- repeated and interrupted tasks --------------------------------------------------------------------------------


def test_a_retried_task_schedules_nothing_twice_and_a_cleared_attempt_begins_a_new_wait(
    scene: Scene, broker: EmbeddedBroker
) -> None:
    scene.submission_says(*traceback(REFUSED))
    scene.run("submit_1")
    scene.run("schedule_2")
    first = scene.result("schedule_2")
    scene.run("schedule_2")
    assert scene.result("schedule_2") == first

    scene.run("submit_1")
    scene.run("schedule_2")
    second = scene.result("schedule_2")
    with broker.ledger.read() as connection:
        assert {each.message.id for each in listing.page(connection).records} == {first, second}
    assert first != second


def test_an_attempt_whose_worker_is_gone_is_followed_by_another(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_group, "LATE_HISTORY_SECONDS", 0)
    scene.submission_says(*traceback(REFUSED))
    scene.run("submit_1")
    # The history that it pushed when it began is all that is left.
    stored = scene.result("submit_1", HISTORY_XCOM_KEY)
    stored["phase"] = "submitted"
    stored["attempts"][0] |= {"ended_at": None, "verdict": None, "rule": "", "reason": "", "exit_code": None}
    assert scene.run("schedule_2") == "success"
    assert scene.result("schedule_2", "spark_retry_ticket")["verdict"] == "infrastructure"

    del scene.xcoms["orders.submit_1", HISTORY_XCOM_KEY]
    assert scene.run("schedule_2") == "success"


def test_an_attempt_that_was_never_made_is_not_followed_by_another(scene: Scene) -> None:
    scene.states["orders.submit_2"] = "upstream_failed"
    assert scene.run("schedule_3") == "skipped"
    assert scene.said == "the attempt before was not made"


def test_a_mapped_group_looks_at_the_attempts_of_its_own_index(scene: Scene) -> None:
    scene.states |= {"orders.submit_1": "failed", "orders.submit_2": "success"}
    context: Any = {"ti": TaskInstance(scene, "orders.outcome", map_index=4)}
    names = ["orders.submit_1", "orders.submit_2", "orders.submit_3"]
    assert states_of(context, names) == dict(zip(names, ("failed", "success", None), strict=True))


def test_the_history_of_an_attempt_that_is_just_being_stopped_is_waited_for(scene: Scene) -> None:
    scene.submission_says(*traceback(MISTAKE))
    scene.run("submit_1")
    last_word = scene.result("submit_1", HISTORY_XCOM_KEY)
    scene.xcoms["orders.submit_1", HISTORY_XCOM_KEY] = last_word | {"phase": "submitted"}
    timer = Timer(0.5, lambda: scene.xcoms.update({("orders.submit_1", HISTORY_XCOM_KEY): last_word}))
    timer.start()
    assert scene.run("schedule_2") == "skipped"
    timer.join()


@pytest.mark.parametrize(("known_as", "next_one"), [("failed", "skipped"), ("running", "success")])
def test_an_attempt_that_a_user_ends_is_final_and_one_that_ends_with_its_worker_is_not(
    scene: Scene, known_as: str, next_one: str
) -> None:
    scene.submission_says("killed", code=143)
    scene.states["orders.submit_1"] = known_as
    scene.dag.get_task("orders.submit_1").on_kill()
    assert scene.run("submit_1") == "failed"
    assert scene.run("schedule_2") == next_one


# -- the wait ------------------------------------------------------------------------------------------------------


def test_a_retry_that_is_cancelled_is_given_up(scene: Scene, broker: EmbeddedBroker) -> None:
    scene.submission_says(*traceback(REFUSED))
    scene.run("submit_1")
    scene.run("schedule_2")
    scene.run("wait_2")
    broker.cancel([scene.result("schedule_2")])
    assert scene.resume("wait_2") == "failed"
    assert scene.said == "the retry was given up: its message was cancelled"
    scene.states["orders.submit_2"] = scene.states["orders.submit_3"] = "upstream_failed"
    assert scene.run("outcome") == "failed"
    assert "not tried again: attempt 2 was given up" in scene.said


def test_a_dispatched_retry_leaves_nothing_in_its_channel(
    scene: Scene, broker: EmbeddedBroker, dispatch: Dispatch
) -> None:
    scene.submission_says(*traceback(REFUSED))
    scene.run("submit_1")
    scene.run("schedule_2")
    scene.run("wait_2")
    dispatch(timedelta(hours=1))
    assert len(broker.peek("delay.retries", limit=10)) == 1
    scene.resume("wait_2")
    assert broker.peek("delay.retries", limit=10) == []


def test_a_sensor_with_no_retry_before_it_says_what_to_do() -> None:
    with DAG("shop", schedule=None):
        sensor = DelayedRetrySensor(task_id="wait")
    context: Any = {"ti": None}
    with pytest.raises(AirflowFailException, match="put a ScheduleRetryOperator before it"):
        sensor.execute(context)


# -- the outcome where nothing was submitted -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "others", "state", "said"),
    [
        ("skipped", "skipped", "skipped", "its first attempt is skipped"),
        ("upstream_failed", "skipped", "failed", "was never submitted: a task before it failed"),
    ],
)
def test_without_a_submission_the_outcome_is_that_of_the_tasks_before(
    scene: Scene, first: str, others: str, state: str, said: str
) -> None:
    scene.states |= {"orders.submit_1": first, "orders.submit_2": others, "orders.submit_3": others}
    assert scene.run("outcome") == state
    assert said in scene.said
