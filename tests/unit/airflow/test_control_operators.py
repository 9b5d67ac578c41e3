"""The operators that cancel, reschedule and expedite."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.arguments import compose_message
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.operators.control import CancelMessageOperator, RescheduleMessageOperator

HOUR = timedelta(hours=1)


@pytest.fixture
def messages(broker: EmbeddedBroker) -> EmbeddedBroker:
    """``sent`` was dispatched, ``a`` and ``b`` wait."""
    now = broker.clock.now()
    broker.schedule([compose_message("invoices", "x", message_id=each, deliver_after=HOUR, now=now) for each in "ab"])
    broker.schedule([compose_message("invoices", "x", message_id="sent", now=now)])
    return broker


@pytest.fixture
def states(messages: EmbeddedBroker) -> Callable[[], dict[str, State]]:
    def read() -> dict[str, State]:
        with messages.ledger.read() as connection:
            return {each: listing.get(connection, each).state for each in ("a", "b", "sent")}

    return read


def cancel(message_ids: Any, **options: Any) -> list[str]:
    return CancelMessageOperator(task_id="cancel", message_ids=message_ids, **options).execute({})


def reschedule(message_ids: Any, **options: Any) -> list[str]:
    return RescheduleMessageOperator(task_id="move", message_ids=message_ids, **options).execute({})


@pytest.mark.parametrize(
    ("given", "cancelled"),
    [("a", ["a"]), (["a", "b", "a"], ["a", "b"]), ((each for each in ("a", ["b"])), ["a", "b"]), ([], [])],
    ids=["one id", "a list", "the output of mapped tasks", "nothing"],
)
def test_cancelled_messages_are_never_dispatched(
    messages: EmbeddedBroker, dispatch: Callable[..., int], given: Any, cancelled: list[str]
) -> None:
    """A27, B56"""
    assert cancel(given) == cancelled
    assert dispatch(2 * HOUR) == 2 - len(cancelled)


def test_cancelling_twice_is_success(messages: EmbeddedBroker) -> None:
    assert cancel("a") == cancel("a") == ["a"]


def test_too_late_fails_at_once_and_cancels_nothing(states: Callable[[], dict[str, State]]) -> None:
    with pytest.raises(AirflowFailException, match="message 'sent' is DISPATCHED and cannot be cancelled any more"):
        cancel(["a", "sent", "b"])
    assert states() == {"a": State.SCHEDULED, "b": State.SCHEDULED, "sent": State.DISPATCHED}


def test_too_late_can_be_ignored(states: Callable[[], dict[str, State]]) -> None:
    assert cancel(["a", "sent", "b"], on_too_late="ignore") == ["a", "b"]
    assert states() == {"a": State.CANCELLED, "b": State.CANCELLED, "sent": State.DISPATCHED}


@pytest.mark.parametrize("on_too_late", ["fail", "ignore"])
def test_an_unknown_message_is_named(states: Callable[[], dict[str, State]], on_too_late: str) -> None:
    """B13"""
    with pytest.raises(AirflowFailException, match="message 'nobody' is not known; `airflow delay list` shows"):
        cancel(["a", "nobody"], on_too_late=on_too_late)
    assert states()["a"] is State.SCHEDULED


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("['a', 'b']", "is a list that a template turned into text; pass the output of the task itself"),
        ("", "message_ids: is empty;"),
        (7, "message_ids: 7 is not an id; pass an id, a list of ids or a task's output"),
        (None, "message_ids: None is not an id"),
    ],
)
def test_an_invalid_id_is_refused(messages: EmbeddedBroker, given: Any, sentence: str) -> None:
    with pytest.raises(AirflowFailException) as failure:
        cancel(given)
    assert sentence in str(failure.value)


def test_a_bad_choice_is_refused(messages: EmbeddedBroker) -> None:
    with pytest.raises(AirflowFailException, match="on_too_late: 'skip' is unknown; use one of fail, ignore"):
        cancel("a", on_too_late="skip")


def due(broker: EmbeddedBroker, message_id: str) -> datetime:
    with broker.ledger.read() as connection:
        return listing.get(connection, message_id).message.deliver_at


def test_waiting_messages_move_to_another_time(messages: EmbeddedBroker) -> None:
    """A27, B59"""
    there = datetime(2035, 1, 1, tzinfo=UTC)
    assert reschedule(["a"], deliver_at="2035-01-01 00:00:00+00:00") == ["a"]
    assert due(messages, "a") == there

    assert reschedule("b", deliver_after=timedelta(days=2)) == ["b"]
    assert due(messages, "b") > messages.clock.now() + timedelta(days=1)


def test_expedited_messages_are_due_now(messages: EmbeddedBroker, dispatch: Callable[..., int]) -> None:
    assert dispatch() == 0
    assert reschedule(["a", "b"], expedite=True) == ["a", "b"]
    assert dispatch() == 2


def test_moving_is_all_or_none(messages: EmbeddedBroker) -> None:
    before = due(messages, "a")
    with pytest.raises(AirflowFailException, match="message 'sent' is DISPATCHED and cannot be rescheduled any more"):
        reschedule(["a", "sent"], deliver_after=7200)
    assert due(messages, "a") == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "no new time is given; give one of deliver_at, deliver_after and expedite=True"),
        ({"deliver_at": "2030-01-01Z", "deliver_after": 3}, "deliver_at and deliver_after are given; give one of"),
        ({"deliver_after": 3, "expedite": True}, "deliver_after and expedite are given; give one of"),
        ({"deliver_at": "2030-01-01T00:00:00"}, "has no time zone"),
        ({"deliver_after": -60, "on_past": "fail"}, "has passed; choose a later time"),
        ({"deliver_after": timedelta(days=36_600)}, "is more than max_delay"),
    ],
)
def test_a_bad_new_time_is_refused(messages: EmbeddedBroker, options: dict[str, Any], sentence: str) -> None:
    before = due(messages, "a")
    with pytest.raises(AirflowFailException) as failure:
        reschedule("a", **options)
    assert sentence in str(failure.value)
    assert due(messages, "a") == before
