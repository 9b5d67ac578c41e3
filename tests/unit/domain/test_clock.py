# ruff: noqa: DTZ001 - naive datetimes are bounds for hypothesis here, or what is refused
from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.domain.clock import ONE_MS, SystemClock, ceil_ms, floor_ms, from_ms

moments = st.datetimes(datetime(1900, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC))


@pytest.mark.parametrize(
    ("microseconds", "rounded_down", "rounded_up"), [(0, 0, 0), (1, 0, 1), (999, 0, 1), (1000, 1, 1), (1001, 1, 2)]
)
def test_a_due_time_is_rounded_up_and_now_is_rounded_down(microseconds: int, rounded_down: int, rounded_up: int):
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
    assert floor_ms(moment) == rounded_down
    assert ceil_ms(moment) == rounded_up


@given(moments)
def test_rounding_a_due_time_never_makes_it_earlier_and_costs_less_than_a_millisecond(moment: datetime):
    assert timedelta(0) <= from_ms(ceil_ms(moment)) - moment < ONE_MS
    assert timedelta(0) <= moment - from_ms(floor_ms(moment)) < ONE_MS


@given(due=moments, now=moments)
def test_a_message_never_counts_as_due_before_its_time(due: datetime, now: datetime):
    if ceil_ms(due) <= floor_ms(now):
        assert due <= now


@given(st.integers(min_value=-(10**12), max_value=10**14))
def test_milliseconds_survive_the_way_through_a_datetime(milliseconds: int):
    assert ceil_ms(from_ms(milliseconds)) == floor_ms(from_ms(milliseconds)) == milliseconds


def test_the_system_clock_is_aware_and_in_utc():
    """B21"""
    assert SystemClock().now().utcoffset() == timedelta(0)
