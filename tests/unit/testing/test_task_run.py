from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.operators.control import CancelMessageOperator
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.sensors.message import MessageSensor
from airflow_delay_provider.testing.kit import DelayTestKit
from airflow_delay_provider.testing.task_run import TaskRun

pytestmark = pytest.mark.usefixtures("delay_connection")
MONTH = timedelta(days=30)


def remind(**options: Any) -> ScheduleMessageOperator:
    return ScheduleMessageOperator(
        task_id="remind", channel="reminders", payload="{{ ds }}", deliver_after=MONTH, **options
    )


def test_a_task_schedules_on_the_kits_clock_and_database(delay_kit: DelayTestKit):
    """A26, A38, A48, E2"""
    run = TaskRun(remind(), ds="2030-01-01")
    assert not run.waiting
    [scheduled] = delay_kit.scheduled()
    assert scheduled.id == run.result
    assert scheduled.deliver_at == delay_kit.clock.now() + MONTH
    delay_kit.advance(MONTH)
    assert [message.payload for message in delay_kit.received("reminders")] == [b"2030-01-01"]


def test_a_task_that_waits_goes_on_after_its_message(delay_kit: DelayTestKit):
    """A2, A48"""
    run = TaskRun(remind(wait_for_dispatch=True), ds="x")
    assert run.waiting
    delay_kit.advance(MONTH)
    assert run.resume() == delay_kit.received("reminders")[0].id
    assert not run.waiting


async def test_a_task_can_be_resumed_on_an_event_loop(delay_kit: DelayTestKit):
    run = TaskRun(remind(wait_for_dispatch=True), ds="x")
    delay_kit.advance(MONTH)
    assert run.resume() == run.result


def test_a_task_resumed_too_early_says_what_to_do(delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("airflow_delay_provider.testing.task_run._PATIENCE_SECONDS", 0.1)
    run = TaskRun(remind(wait_for_dispatch=True), ds="x")
    with pytest.raises(AssertionError, match=r"'remind' still waits; advance the kit"):
        run.resume()


def test_a_task_that_ended_cannot_be_resumed():
    run = TaskRun(remind(), ds="x")
    with pytest.raises(AssertionError, match="'remind' does not wait"):
        run.resume()


def test_the_same_task_in_the_same_run_schedules_once(delay_kit: DelayTestKit):
    """A28"""
    first, again, other_run = (TaskRun(remind(), ds="x", run_id=run) for run in ("one", "one", "two"))
    assert first.result == again.result != other_run.result
    assert len(delay_kit.scheduled()) == 2


def test_a_task_reads_the_results_of_others(delay_kit: DelayTestKit):
    with DAG("invoices", schedule=None):
        scheduled = remind()
        cancel = CancelMessageOperator(task_id="cancel", message_ids=scheduled.output)
    message_id = TaskRun(scheduled, ds="x").result
    TaskRun(cancel, results={"remind": message_id})
    assert delay_kit.record(message_id).state is State.CANCELLED
    assert delay_kit.record(message_id).message.origin.dag_id == "invoices"  # type: ignore[union-attr]
    assert delay_kit.advance(2 * MONTH) == 0


def test_a_sensor_takes_the_message_it_waited_for(delay_kit: DelayTestKit):
    run = TaskRun(MessageSensor(task_id="answer", channel="answers"))
    assert run.waiting
    delay_kit.schedule("answers", {"n": 1}, deliver_after=MONTH)
    delay_kit.advance(MONTH)
    assert run.resume()["payload"] == {"n": 1}
    assert delay_kit.received("answers") == []
