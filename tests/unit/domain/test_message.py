# ruff: noqa: DTZ001 - naive datetimes are bounds for hypothesis here, or what is refused
from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.domain.exceptions import InvalidMessageError, PayloadError
from airflow_delay_provider.domain.message import Message, Origin, decode_payload, encode_payload

DUE = datetime(2030, 1, 31, 17, tzinfo=UTC)


def message(**changes: Any) -> Message:
    return Message(**{"channel": "orders", "payload": b"{}", "deliver_at": DUE} | changes)


def test_a_message_has_sensible_defaults():
    """A21, B22, B45"""
    made = message()
    assert made.id != message().id
    assert (made.key, dict(made.headers), made.priority, made.handled_count, made.origin) == (None, {}, 0, 0, None)
    assert made.content_type == "application/octet-stream"


def test_a_message_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        message().channel = "other"  # type: ignore[misc]


def test_the_due_time_is_kept_in_utc():
    """B21, B45"""
    made = message(deliver_at=datetime(2030, 1, 31, 19, 30, tzinfo=timezone(timedelta(hours=2, minutes=30))))
    assert made.deliver_at == DUE
    assert made.deliver_at.tzinfo is UTC


@given(st.datetimes(datetime(1971, 1, 1), datetime(9000, 1, 1), timezones=st.timezones()))
def test_the_due_time_is_a_whole_millisecond_and_never_earlier_than_asked(moment: datetime):
    """C9"""
    made = message(deliver_at=moment)
    assert made.deliver_at.microsecond % 1000 == 0
    assert timedelta(0) <= made.deliver_at - moment.astimezone(UTC) < timedelta(milliseconds=1)


NAMES = ["orders", "_x", "9", "delay:routing.key", "a/b-c_d.e", "x" * 255]
NO_NAMES = ["", ".x", "-x", "x y", "x\n", "ü", "x" * 256, None, 5, b"orders"]


@pytest.mark.parametrize("channel", NAMES)
def test_a_channel_may_be_a_queue_a_topic_or_an_exchange_with_a_routing_key(channel: str):
    assert message(channel=channel).channel == channel


REFUSED: list[tuple[str, str, Any]] = [
    *(("channel", "channel", value) for value in NO_NAMES),
    *(("id", "message_id", value) for value in ["", "x" * 257, "a\nb", "a\0", None, 5]),
    *(("payload", "payload", value) for value in ["text", None, bytearray(b"x")]),
    *(("key", "key", value) for value in [5, b"k", "a\0b", "\ud800"]),
    *(("headers", "headers", value) for value in [[("a", "b")], "x", {"a": 1}, {1: "a"}, {"a": "\0"}, {"a": "\ud800"}]),
    *(("content_type", "content_type", value) for value in [None, "", "x" * 256, 5, "a\0"]),
    *(
        ("deliver_at", "deliver_at", value)
        for value in [
            datetime(2030, 1, 1),
            datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
            datetime.max.replace(tzinfo=UTC),
        ]
    ),
]


@pytest.mark.parametrize(("argument", "field", "value"), REFUSED)
def test_messages_that_no_broker_could_deliver_are_refused_with_the_field_and_a_remedy(
    argument: str, field: str, value: Any
):
    """A30, B45"""
    with pytest.raises(InvalidMessageError) as refused:
        message(**{argument: value})
    assert refused.value.field == field
    problem, _, remedy = str(refused.value).partition("; ")
    assert problem.startswith(f"{field}: ")
    assert remedy


def test_a_requeued_message_differs_in_its_due_time_and_its_count_only():
    """A15, A23"""
    first = message(key="k", headers={"a": "b"}, priority=3, origin=Origin(dag_id="d", run_id="r", task_id="t"))
    again = first.requeued(DUE + timedelta(hours=1))
    assert again == replace(first, deliver_at=DUE + timedelta(hours=1), handled_count=1)
    assert again.requeued(DUE).handled_count == 2


def test_a_replayed_message_starts_again_with_a_handled_count_of_zero():
    """A23, A25"""
    first = message(handled_count=5)
    again = first.replayed(DUE + timedelta(hours=1))
    assert again == replace(first, deliver_at=DUE + timedelta(hours=1), handled_count=0)


def test_the_id_of_a_tasks_message_never_changes():
    """The value itself is part of the promise: an upgrade between two tries must not schedule twice."""
    origin = Origin(dag_id="bills", run_id="manual__2030", task_id="remind")
    assert origin.message_id(0) == "7561068e-6b40-5411-8fa8-93eb48e2b498"
    assert origin.message_id(0) == replace(origin).message_id(0)


texts = st.text(max_size=5)
origins = st.builds(Origin, dag_id=texts, run_id=texts, task_id=texts, map_index=st.integers(-1, 3))


@given(origins, origins, st.integers(0, 3), st.integers(0, 3))
def test_ids_of_different_messages_differ(one: Origin, other: Origin, here: int, there: int):
    """The parts are not simply glued together: dag "a_b" task "c" is not dag "a" task "b_c"."""
    assert (one.message_id(here) == other.message_id(there)) == ((one, here) == (other, there))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.binary() | st.text() | json_values)
def test_a_payload_comes_back_as_it_was_given(value: Any):
    """B7, B45"""
    assert decode_payload(*encode_payload(value)) == value


@pytest.mark.parametrize(
    ("value", "content_type"),
    [
        (b"\x00\xff", "application/octet-stream"),
        ("grüße", "text/plain; charset=utf-8"),
        ({"a": [1]}, "application/json"),
        (None, "application/json"),
    ],
)
def test_the_content_type_follows_from_the_value(value: Any, content_type: str):
    assert encode_payload(value)[1] == content_type


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


UNWRITABLE = [{1, 2}, object(), float("nan"), "\ud800", {"a": DUE}, nested(100_000)]


@pytest.mark.parametrize("value", UNWRITABLE, ids=["set", "object", "nan", "surrogate", "datetime", "too deep"])
def test_a_payload_that_cannot_be_written_is_refused(value: Any):
    """A30"""
    with pytest.raises(PayloadError, match=r"payload: .*; pass bytes, str or plain JSON data"):
        encode_payload(value)


@pytest.mark.parametrize("content_type", ["application/json", "text/plain; charset=utf-8"])
def test_bytes_that_do_not_match_their_content_type_stay_bytes(content_type: str):
    assert decode_payload(b"\xff{", content_type) == b"\xff{"
