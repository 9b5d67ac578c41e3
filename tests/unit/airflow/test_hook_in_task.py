"""Messages that a task schedules by the hook itself."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.api.datamodels._generated import TIRunContext
from airflow.sdk.execution_time.context import set_current_context
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from sqlalchemy import select

from airflow_delay_provider import DelayHook
from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.message import Origin
from airflow_delay_provider.hooks import task
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from tests.unit.airflow.conftest import TaskInstance


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_CALLS", Counter())


def remind(context: Any, *customers: str) -> list[str]:
    """What a task does: one call for each customer."""
    with set_current_context(context), closing(DelayHook()) as hook:
        return [hook.schedule_message("reminders", {"to": each}, deliver_after=60) for each in customers]


def stored(broker: EmbeddedBroker) -> list[MessageRecord]:
    with broker.ledger.read() as connection:
        ids = [row.id for row in connection.execute(select(scheduled_message.c.id))]
        return [listing.get(connection, each) for each in ids]


def test_a_retried_task_schedules_nothing_twice(broker: EmbeddedBroker, context: Any, ti: TaskInstance) -> None:
    first = remind(context, "anna", "ben")
    ti.try_number += 1
    assert remind(context, "anna", "ben") == first
    assert sorted(record.message.id for record in stored(broker)) == sorted(first)
    assert {record.message.origin for record in stored(broker)} == {
        Origin(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id)
    }


def test_two_hooks_of_one_task_never_share_an_id(broker: EmbeddedBroker, context: Any) -> None:
    assert not set(remind(context, "anna")) & set(remind(context, "anna"))


def test_a_resumed_task_schedules_messages_of_its_own(
    broker: EmbeddedBroker, context: Any, ti: TaskInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deferred task goes on in a new process, which knows nothing of the calls before, in the same try."""
    first = remind(context, "anna")
    monkeypatch.setattr(task, "_CALLS", Counter())
    ti._ti_context_from_server = SimpleNamespace(next_method="execute_complete")
    resumed = remind(context, "ben")
    assert len(stored(broker)) == 2
    monkeypatch.setattr(task, "_CALLS", Counter())
    ti.try_number += 1
    assert remind(context, "ben") == resumed != first


def test_airflow_tells_how_a_task_was_resumed() -> None:
    """By a private name, which each new version must still have."""
    assert "_ti_context_from_server" in RuntimeTaskInstance.__private_attributes__ | RuntimeTaskInstance.model_fields
    assert "next_method" in TIRunContext.model_fields


def test_a_call_that_schedules_nothing_new_says_so(
    broker: EmbeddedBroker, context: Any, ti: TaskInstance, caplog: pytest.LogCaptureFixture
) -> None:
    [message_id] = remind(context, "anna")
    ti.try_number += 1
    with caplog.at_level(logging.INFO):
        remind(context, "anna")
    assert f"Message {message_id} for channel reminders was scheduled before" in caplog.text


def test_ids_of_a_hook_are_not_those_of_an_operator(broker: EmbeddedBroker, context: Any) -> None:
    [by_hook] = remind(context, "anna")
    by_operator = ScheduleMessageOperator(task_id="remind", channel="reminders", payload="x").execute(context)
    assert by_operator != by_hook


def test_outside_of_a_task_each_call_is_a_new_message(broker: EmbeddedBroker) -> None:
    with closing(DelayHook()) as hook:
        ids = {hook.schedule_message("reminders", "Hello", deliver_after=60) for _ in range(2)}
    assert len(ids) == len(stored(broker)) == 2


def test_all_fields_of_a_message_can_be_given(broker: EmbeddedBroker) -> None:
    due = datetime.now(UTC) + timedelta(days=1)
    with closing(DelayHook()) as hook:
        options = {"key": "k", "headers": {"a": "b"}, "content_type": "text/csv", "priority": 3}
        hook.schedule_message("reminders", "1,2", deliver_at=due, message_id="mine", **options)
    [record] = stored(broker)
    message = record.message
    assert (message.id, message.key, message.headers, message.priority) == ("mine", "k", {"a": "b"}, 3)
    assert (message.content_type, message.payload) == ("text/csv", b"1,2")
    assert abs(message.deliver_at - due) < timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"deliver_at": datetime(2030, 1, 1)}, "deliver_at"),  # noqa: DTZ001 - refused because of that
        ({"deliver_at": "2030-01-01T00:00:00Z", "deliver_after": 1}, "deliver_at"),
        ({"on_conflict": "ignore"}, "on_conflict"),
        ({"priority": 256}, "priority"),
    ],
)
def test_bad_input_is_refused_and_stores_nothing(broker: EmbeddedBroker, options: Any, field: str) -> None:
    with closing(DelayHook()) as hook, pytest.raises(InvalidMessageError, match=field):
        hook.schedule_message("reminders", "Hello", **options)
    assert stored(broker) == []
