"""The sensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferred,
)
from airflow.sdk.serde import serialize

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.arguments import compose_message
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, InvalidMessageError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.sensors.message import MessageDispatchedSensor, MessageSensor

HOUR = timedelta(hours=1)
Send = Callable[..., str]


@pytest.fixture
def send(broker: EmbeddedBroker) -> Send:
    def store(message_id: str, payload: Any = "x", **options: Any) -> str:
        message = compose_message("invoices", payload, message_id=message_id, now=broker.clock.now(), **options)
        broker.schedule([message])
        return message_id

    return store


def is_urgent(message: Message) -> bool:
    return message.headers.get("urgency") == "high"


NOT_A_FUNCTION = 7


def dispatched_sensor(message_ids: Any, **options: Any) -> MessageDispatchedSensor:
    return MessageDispatchedSensor(task_id="wait", message_ids=message_ids, poke_interval=0.01, **options)


def sensor(**options: Any) -> MessageSensor:
    return MessageSensor(task_id="wait", channel="invoices", poke_interval=0.01, **options)


def test_dispatched_messages_need_no_waiting(broker: EmbeddedBroker, send: Send) -> None:
    ids = [send("a"), send("b")]
    for deferrable in (True, False):
        assert dispatched_sensor(ids, deferrable=deferrable).execute({}) is None  # type: ignore[func-returns-value]


async def test_waiting_defers_until_all_are_dispatched(
    broker: EmbeddedBroker, send: Send, dispatch: Callable[..., int]
) -> None:
    waiting = dispatched_sensor([send("a"), send("b", deliver_after=60)], timeout=600)
    with pytest.raises(TaskDeferred) as request:
        waiting.execute({})
    assert request.value.timeout == timedelta(seconds=600)

    dispatch(HOUR)
    event = await anext(request.value.trigger.run())
    waiting.execute_complete({}, event.payload)


def test_poking_waits_until_the_time_is_over(broker: EmbeddedBroker, send: Send) -> None:
    with pytest.raises(AirflowSensorTimeout):
        dispatched_sensor(send("a", deliver_after=60), deferrable=False, timeout=0.05).execute({})
    with pytest.raises(AirflowSkipException):
        dispatched_sensor("a", deferrable=False, timeout=0.05, soft_fail=True).execute({})


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_cancelled_message_ends_the_wait(broker: EmbeddedBroker, send: Send, deferrable: bool) -> None:
    ids = [send("a", deliver_after=60), send("b", deliver_after=60)]
    broker.cancel(["b"])
    with pytest.raises(AirflowFailException, match=r"1 of 1 messages were not dispatched \(b cancelled\)"):
        dispatched_sensor(ids, deferrable=deferrable).execute({})


def test_a_soft_failing_sensor_is_skipped_after_a_cancelled_message(broker: EmbeddedBroker, send: Send) -> None:
    event = {"counts": {"cancelled": 1}, "outcomes": {"a": {"change": "cancelled"}}}
    with pytest.raises(AirflowSkipException):
        dispatched_sensor("a", soft_fail=True).resume_execution("execute_complete", {"event": event}, {})


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_message_is_taken_and_returned(broker: EmbeddedBroker, send: Send, deferrable: bool) -> None:
    send("a", {"invoice": 7}, key="k", headers={"h": "v"}, deliver_at="2025-01-01T00:00:00Z")

    assert sensor(deferrable=deferrable).execute({}) == {
        "id": "a",
        "channel": "invoices",
        "payload": {"invoice": 7},
        "payload_is_base64": False,
        "key": "k",
        "headers": {"h": "v"},
        "content_type": "application/json",
        "deliver_at": "2025-01-01T00:00:00+00:00",
        "handled_count": 0,
    }
    assert broker.peek("invoices") == []


@pytest.mark.parametrize(
    ("payload", "options"), [(b"\x00\xff", {}), ("text", {}), (b"{broken", {"content_type": "application/json"})]
)
def test_every_payload_can_be_stored_as_an_xcom(
    broker: EmbeddedBroker, send: Send, payload: Any, options: dict[str, Any]
) -> None:
    send("a", payload, **options)
    taken = sensor().execute({})
    json.dumps(serialize(taken))
    assert taken["payload_is_base64"] is isinstance(payload, bytes)


def test_only_the_first_match_is_taken_and_the_others_stay_in_order(broker: EmbeddedBroker, send: Send) -> None:
    for message_id, urgency in (("a", "low"), ("b", "high"), ("c", "high"), ("d", "low")):
        send(message_id, headers={"urgency": urgency})

    taken = sensor(filter=f"{__name__}.is_urgent").execute({})

    assert taken["id"] == "b"
    left = broker.peek("invoices", limit=10)
    assert [(message.id, message.handled_count) for message in left] == [("a", 0), ("c", 0), ("d", 0)]


@pytest.mark.parametrize("event", [None, {"message_id": "b", "give_up_at": "2100-01-01T00:00:00+00:00"}])
def test_a_taken_message_is_returned_even_if_the_others_cannot_be_released(
    broker: EmbeddedBroker, send: Send, monkeypatch: pytest.MonkeyPatch, event: dict[str, Any] | None
) -> None:
    """It has left its channel: a task that failed now would have lost it."""
    for message_id, urgency in (("a", "low"), ("b", "high")):
        send(message_id, headers={"urgency": urgency})

    def is_down(*_args: Any, **_options: Any) -> None:
        raise BrokerError("the broker is down")

    monkeypatch.setattr(EmbeddedBroker, "release", is_down)
    waiting = sensor(filter=f"{__name__}.is_urgent")
    taken = waiting.execute({}) if event is None else waiting.execute_complete({}, event)
    assert taken["id"] == "b"


async def test_waiting_defers_without_content_and_takes_the_message_when_it_comes(
    broker: EmbeddedBroker, send: Send
) -> None:
    waiting = sensor(filter=f"{__name__}.is_urgent", timeout=600)
    with pytest.raises(TaskDeferred) as request:
        waiting.execute({})
    send("a", "very secret", headers={"urgency": "high"})

    event = await anext(request.value.trigger.run())
    assert event.payload["message_id"] == "a"
    assert "secret" not in repr((event.payload, request.value.trigger.serialize()))
    assert waiting.execute_complete({}, event.payload)["payload"] == "very secret"


def test_a_sensor_waits_again_within_its_timeout_if_another_consumer_took_the_message(broker: EmbeddedBroker) -> None:
    give_up_at = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    with pytest.raises(TaskDeferred) as request:
        sensor(timeout=600).execute_complete({}, {"message_id": "a", "give_up_at": give_up_at})

    assert request.value.timeout is not None
    assert timedelta(seconds=40) < request.value.timeout <= timedelta(seconds=100)
    assert request.value.trigger.serialize()[1]["give_up_at"] == give_up_at


def test_a_sensor_whose_time_is_over_gives_up(broker: EmbeddedBroker) -> None:
    event = {"message_id": "a", "give_up_at": "2020-01-01T00:00:00+00:00"}
    with pytest.raises(AirflowSensorTimeout, match="no message in channel 'invoices' within 600 s"):
        sensor(timeout=600).resume_execution("execute_complete", {"event": event}, {})
    with pytest.raises(AirflowSkipException):
        sensor(timeout=600, soft_fail=True).resume_execution("execute_complete", {"event": event}, {})


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no.such.module.filter", "filter: 'no.such.module.filter' cannot be imported"),
        (f"{__name__}.missing", "cannot be imported"),
        ("not a path", "cannot be imported"),
        (f"{__name__}.NOT_A_FUNCTION", "is not a function; give the dotted path of one"),
    ],
)
def test_a_bad_filter_is_named_before_anything_is_received(
    broker: EmbeddedBroker, send: Send, path: str, sentence: str
) -> None:
    send("a")
    with pytest.raises(ConfigurationError) as failure:
        sensor(filter=path).execute({})
    assert sentence in str(failure.value)
    assert [message.id for message in broker.peek("invoices")] == ["a"]


def breaks(_message: Message) -> bool:
    raise ZeroDivisionError


def test_a_function_as_filter_is_an_error_of_the_dag() -> None:
    with pytest.raises(InvalidMessageError, match="filter: a function cannot be stored for the triggerer; put it into"):
        sensor(filter=lambda _message: True)


def test_a_filter_that_fails_leaves_every_message_in_place(broker: EmbeddedBroker, send: Send) -> None:
    send("a")
    with pytest.raises(ZeroDivisionError):
        sensor(filter=f"{__name__}.breaks").execute({})
    assert [message.handled_count for message in broker.peek("invoices")] == [0]
