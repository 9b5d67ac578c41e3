# ruff: noqa: DTZ001 - naive datetimes are bounds for hypothesis here, or what is refused
from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.domain.arguments import (
    Limits,
    OnConflict,
    compose_message,
    parse_choice,
    resolve_deliver_at,
)
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.domain.exceptions import (
    ConfigurationError,
    InvalidMessageError,
    PastDeliveryError,
    PayloadError,
    TooFarError,
    TooSoonError,
)
from airflow_delay_provider.domain.message import Message

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("given_time", "due"),
    [
        ({"deliver_at": NOW + HOUR}, NOW + HOUR),
        ({"deliver_at": "2030-01-01T01:00:00Z"}, NOW + HOUR),
        ({"deliver_at": "2030-01-01T01:00:00+00:00"}, NOW + HOUR),
        ({"deliver_at": " 2030-01-01T02:00:00+01:00 "}, NOW + HOUR),
        ({"deliver_at": "20300101T010000Z"}, NOW + HOUR),
        ({"deliver_at": (NOW + HOUR).astimezone(timezone(timedelta(hours=-8)))}, NOW + HOUR),
        ({"deliver_at": NOW - HOUR}, NOW - HOUR),
        ({"deliver_after": HOUR}, NOW + HOUR),
        ({"deliver_after": 3600}, NOW + HOUR),
        ({"deliver_after": 0.25}, NOW + timedelta(milliseconds=250)),
        ({"deliver_after": "3600"}, NOW + HOUR),
        ({"deliver_after": 0}, NOW),
        ({"deliver_after": -3600}, NOW - HOUR),
        ({"deliver_after": timedelta(days=730)}, NOW + timedelta(days=730)),
        ({}, NOW),
    ],
)
def test_the_due_time_is_given_at_or_after(given_time: dict[str, Any], due: datetime):
    """B3, B58, D1, E2"""
    assert resolve_deliver_at(**given_time, now=NOW) == due


@pytest.mark.parametrize(
    ("given_time", "field"),
    [
        ({"deliver_at": "tomorrow"}, "deliver_at"),
        ({"deliver_at": ""}, "deliver_at"),
        ({"deliver_at": "2030-13-01T00:00:00Z"}, "deliver_at"),
        ({"deliver_at": "2030-01-01T00:00:00"}, "deliver_at"),
        ({"deliver_at": datetime(2030, 1, 1)}, "deliver_at"),
        ({"deliver_at": 1893456000}, "deliver_at"),
        ({"deliver_at": "9999-12-31T23:59:59-05:00"}, "deliver_at"),
        ({"deliver_after": "an hour"}, "deliver_after"),
        ({"deliver_after": float("nan")}, "deliver_after"),
        ({"deliver_after": float("inf")}, "deliver_after"),
        ({"deliver_after": [1]}, "deliver_after"),
        ({"deliver_after": timedelta(days=4_000_000)}, "deliver_after"),
        ({"deliver_after": timedelta(days=-4_000_000)}, "deliver_after"),
        ({"deliver_at": NOW, "deliver_after": 1}, "deliver_at"),
        ({"on_past": "ignore"}, "on_past"),
    ],
)
def test_a_time_that_is_malformed_or_without_zone_is_refused(given_time: dict[str, Any], field: str):
    """A30, B3"""
    with pytest.raises(InvalidMessageError) as refused:
        resolve_deliver_at(**given_time, now=NOW)
    assert refused.value.field == field
    assert "; " in str(refused.value)


@pytest.mark.parametrize(
    ("given_time", "field"),
    [({"deliver_at": NOW - HOUR}, "deliver_at"), ({"deliver_after": -0.001}, "deliver_after")],
)
def test_the_past_is_refused_only_when_asked(given_time: dict[str, Any], field: str):
    """A30, B58"""
    with pytest.raises(PastDeliveryError) as refused:
        resolve_deliver_at(**given_time, on_past="fail", now=NOW)
    assert refused.value.field == field
    assert resolve_deliver_at(**given_time, now=NOW) < NOW


def test_now_is_not_the_past():
    assert resolve_deliver_at(deliver_at=NOW, on_past="fail", now=NOW) == NOW


seconds = st.floats(-1e9, 1e9)


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)), seconds)
def test_a_message_is_due_at_once_exactly_when_its_delay_is_not_positive(now: datetime, delay: float):
    """A10: also when the clock stands between two milliseconds."""
    message = compose_message("c", b"", deliver_after=delay, now=now)
    assert (ceil_ms(message.deliver_at) <= floor_ms(now)) == (timedelta(seconds=delay) <= timedelta(0))


@given(
    st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)), seconds.filter(lambda s: s > 0)
)
def test_a_message_that_waits_is_never_early_and_at_most_a_millisecond_late(now: datetime, delay: float):
    """C9"""
    due = now + timedelta(seconds=delay)
    message = compose_message("c", b"", deliver_at=due, now=now)
    assert message.deliver_at - due < timedelta(milliseconds=1)
    if due > now:
        assert message.deliver_at >= due


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("channel", {"channel": "no name"}),
        ("payload", {"payload": object()}),
        ("deliver_at", {"deliver_at": "soon"}),
        ("deliver_after", {"deliver_after": "soon"}),
        ("on_past", {"on_past": "soon"}),
        ("message_id", {"message_id": ""}),
        ("key", {"key": 1}),
        ("headers", {"headers": {"a": 1}}),
        ("content_type", {"content_type": "x" * 300}),
        ("priority", {"priority": "high"}),
        ("priority", {"priority": None}),
        ("priority", {"priority": 1.5}),
        ("priority", {"priority": -1}),
        ("priority", {"priority": 256}),
    ],
)
def test_each_refusal_names_its_field_and_a_remedy(field: str, arguments: dict[str, Any]):
    """A30, B3"""
    with pytest.raises(InvalidMessageError) as refused:
        compose_message(**({"channel": "c", "payload": b"", "now": NOW} | arguments))
    assert refused.value.field == field
    problem, _, remedy = str(refused.value).partition("; ")
    assert problem.startswith(f"{field}: ")
    assert len(remedy) > 5


def test_given_values_arrive_in_the_message():
    """B7, B31"""
    message = compose_message(
        "orders",
        {"n": 1},
        deliver_after=60,
        message_id="order-1",
        key="customer-7",
        headers={"trace": "abc"},
        content_type="application/vnd.order+json",
        priority="9",  # type: ignore[arg-type]  # a template renders to text
        now=NOW,
    )
    assert message == Message(
        channel="orders",
        payload=b'{"n":1}',
        deliver_at=NOW + timedelta(minutes=1),
        id="order-1",
        key="customer-7",
        headers={"trace": "abc"},
        content_type="application/vnd.order+json",
        priority=9,
    )


def test_without_an_id_a_message_gets_one_of_its_own():
    assert compose_message("c", b"", now=NOW).id != compose_message("c", b"", now=NOW).id


def due(delay: timedelta, payload: bytes = b"") -> Message:
    return Message(channel="c", payload=payload, deliver_at=NOW + delay)


@pytest.mark.parametrize("delay", [2 * HOUR, 3 * HOUR, 4 * HOUR])
def test_limits_include_their_bounds(delay: timedelta):
    Limits(min_delay=2 * HOUR, max_delay=4 * HOUR, max_payload_bytes=3).check(due(delay, b"123"), now=NOW)


@pytest.mark.parametrize("delay", [timedelta(milliseconds=7_199_999), timedelta(0), -HOUR])
def test_a_delay_below_the_minimum_is_too_soon(delay: timedelta):
    """B4, B25, B57"""
    with pytest.raises(TooSoonError, match=r"deliver_at: .* min_delay \(2:00:00\) from now; .*lower min_delay"):
        Limits(min_delay=2 * HOUR).check(due(delay), now=NOW)


@pytest.mark.parametrize("delay", [timedelta(0), -HOUR, timedelta(milliseconds=1)])
def test_without_a_minimum_every_time_is_allowed(delay: timedelta):
    """B57, B58"""
    Limits().check(due(delay), now=NOW)


def test_a_delay_above_the_maximum_is_too_far():
    """A30"""
    with pytest.raises(TooFarError, match=r"deliver_at: .*; choose an earlier time, or raise max_delay"):
        Limits(max_delay=HOUR).check(due(HOUR + timedelta(milliseconds=1)), now=NOW)


def test_a_payload_above_the_maximum_is_refused():
    with pytest.raises(PayloadError, match=r"payload: 4 bytes .*; send a reference .* or raise max_payload_bytes"):
        Limits(max_payload_bytes=3).check(due(HOUR, b"1234"), now=NOW)


def test_two_years_ahead_is_within_the_default_limits():
    """E2"""
    Limits().check(due(timedelta(days=2 * 366)), now=NOW)


@pytest.mark.parametrize("empty", [{}, {"min_delay": "", "max_delay": None, "max_payload_bytes": ""}, {"other": 1}])
def test_settings_that_say_nothing_leave_the_defaults(empty: dict[str, Any]):
    """A21"""
    assert Limits.from_settings(empty) == Limits()


def test_limits_are_read_from_numbers_or_their_text():
    settings = {"min_delay": 120, "max_delay": "900.5", "max_payload_bytes": "100"}
    assert Limits.from_settings(settings) == Limits(
        min_delay=timedelta(minutes=2), max_delay=timedelta(seconds=900.5), max_payload_bytes=100
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"min_delay": "2 min"},
        {"max_delay": []},
        {"max_payload_bytes": "1MB"},
        {"max_delay": "inf"},
        {"min_delay": "nan"},
    ],
)
def test_settings_that_are_no_numbers_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigurationError, match=r"must be numbers .*; correct the connection's extra"):
        Limits.from_settings(settings)


@pytest.mark.parametrize("value", ["replace", OnConflict.REPLACE])
def test_a_choice_is_named_by_its_text_or_itself(value: str):
    """A28"""
    assert parse_choice("on_conflict", OnConflict, value) is OnConflict.REPLACE


@pytest.mark.parametrize("value", ["overwrite", "", None])
def test_an_unknown_choice_is_refused_with_the_known_ones(value: Any):
    with pytest.raises(InvalidMessageError, match=r"on_conflict: .* is unknown; use one of keep, fail, replace"):
        parse_choice("on_conflict", OnConflict, value)


def test_limits_that_let_nothing_through_are_refused():
    with pytest.raises(ConfigurationError, match=r"min_delay: .* is more than max_delay .*; correct"):
        Limits.from_settings({"min_delay": 20, "max_delay": 10})
