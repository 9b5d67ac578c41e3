"""The hook and the operator that bring dead messages back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.arguments import compose_message
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.message import Origin
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.operators.control import ReplayMessageOperator
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator


def give_up(broker: EmbeddedBroker, reason: str = "KeyError: 'amount'") -> None:
    for delivery in broker.receive("invoices", limit=10):
        broker.dead_letter(delivery, channel="invoices.dead", reason=reason)


@pytest.fixture
def dead(broker: EmbeddedBroker) -> EmbeddedBroker:
    """``a`` and ``b`` of the DAG ``billing`` are dead, and ``waits`` is not."""
    now, origin = broker.clock.now(), Origin(dag_id="billing", run_id="r", task_id="t")
    broker.schedule([compose_message("invoices", "x", message_id=each, now=now, origin=origin) for each in "ab"])
    give_up(broker)
    broker.schedule([compose_message("invoices", "x", message_id="waits", deliver_after=timedelta(hours=1), now=now)])
    return broker


def replay(**options: Any) -> int:
    return ReplayMessageOperator(task_id="replay", **options).execute({})


def ids_in_channel(broker: EmbeddedBroker) -> list[str]:
    return [each.id for each in broker.peek("invoices", limit=10)]


@pytest.mark.parametrize(
    ("options", "replayed"),
    [
        ({"message_ids": "b"}, ["b"]),
        ({"message_ids": ["a", ["b"]]}, ["a", "b"]),
        ({"channel": "invoices"}, ["a", "b"]),
        ({"reason": "amount", "dag_id_filter": "billing"}, ["a", "b"]),
        ({"reason": "something else"}, []),
        ({"since": "2001-01-01T00:00:00Z", "until": "2200-01-01T00:00:00Z"}, ["a", "b"]),
        ({"dag_id_filter": "another"}, []),
        ({"message_ids": []}, []),
    ],
)
def test_selected_messages_are_dispatched_again(
    dead: EmbeddedBroker, dispatch: Callable[..., int], options: dict[str, Any], replayed: list[str]
) -> None:
    """A25"""
    assert replay(**options) == len(replayed)
    dispatch(timedelta(0))
    assert ids_in_channel(dead) == replayed


def test_an_id_that_is_not_dead_fails_the_task_or_is_ignored(dead: EmbeddedBroker) -> None:
    """A12: dead messages are replayed nevertheless."""
    with pytest.raises(AirflowFailException, match=r"message 'waits' is no dead letter.*on_not_dead"):
        replay(message_ids=["a", "waits"])
    assert replay(message_ids=["b", "waits"], on_not_dead="ignore") == 1


def test_a_replay_of_everything_must_be_asked_for(dead: EmbeddedBroker) -> None:
    with pytest.raises(AirflowFailException, match="no messages are selected; give ids, a channel"):
        replay()
    with pytest.raises(InvalidMessageError, match="since: 2030-01-01T00:00:00 has no time zone"):
        DelayHook().replay(since=datetime(2030, 1, 1))  # noqa: DTZ001 - that is what is refused


def test_a_cleared_task_schedules_a_dead_message_again_and_waits_for_it(
    broker: EmbeddedBroker, context: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A24: it is not green with nothing sent."""
    task = ScheduleMessageOperator(task_id="t", channel="invoices", payload="x", wait_for_dispatch=True)
    message_id = task.execute(context)
    give_up(broker)
    assert task.execute(context) == message_id
    assert "scheduled 0, dispatched 1, kept 0, replaced 0" in capsys.readouterr().out
    assert ids_in_channel(broker) == [message_id]
    task.execute(context)
    assert "kept 1" in capsys.readouterr().out
