from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone

import pytest

from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.testing.clock import START, SettableClock


def test_time_stands_still_until_it_is_advanced():
    """A26"""
    clock = SettableClock()
    assert clock.now() == clock.now() == START
    assert clock.advance(timedelta(days=30)) == clock.now() == START + timedelta(days=30)


def test_time_can_be_set_to_any_moment():
    """A26"""
    clock = SettableClock(datetime(2040, 1, 1, tzinfo=UTC))
    clock.set(datetime(2020, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))))
    assert clock.now() == datetime(2020, 1, 1, tzinfo=UTC)
    assert clock.now().tzinfo is UTC


def test_a_time_without_zone_is_refused():
    naive = datetime(2030, 1, 1)  # noqa: DTZ001 - what is refused
    with pytest.raises(InvalidMessageError, match="has no time zone"):
        SettableClock(naive)
    with pytest.raises(InvalidMessageError, match="has no time zone"):
        SettableClock().set(naive)


def test_advancing_backwards_is_refused():
    with pytest.raises(ValueError, match=r"goes back; use set\(\)"):
        SettableClock().advance(timedelta(seconds=-1))


def test_threads_may_advance_one_clock():
    """A29"""
    clock = SettableClock()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(clock.advance, [timedelta(seconds=1)] * 1000))
    assert clock.now() == START + timedelta(seconds=1000)
