from __future__ import annotations

from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.domain.backoff import Backoff

SECOND = timedelta(seconds=1)


def test_the_ceiling_doubles_from_the_initial_delay_up_to_the_cap():
    """B34"""
    ceilings = [Backoff().ceiling(attempt) for attempt in range(1, 9)]
    assert ceilings == [seconds * SECOND for seconds in (1, 2, 4, 8, 16, 32, 60, 60)]


def test_attempts_without_end_stay_at_the_cap():
    assert Backoff().ceiling(10**6) == 60 * SECOND
    assert Backoff().ceiling(10**400) == 60 * SECOND


@pytest.mark.parametrize(("drawn", "seconds"), [(0.0, 0.5), (0.5, 2.25), (0.75, 3.125)])
def test_the_injected_randomness_decides_the_delay(drawn: float, seconds: float):
    """B35"""
    assert Backoff().delay(3, lambda: drawn) == seconds * SECOND


@given(attempt=st.integers(1, 10**6), seed=st.integers())
def test_a_delay_lies_between_the_floor_and_the_ceiling(attempt: int, seed: int):
    """B35"""
    backoff = Backoff()
    assert backoff.floor <= backoff.delay(attempt, Random(seed).random) <= backoff.ceiling(attempt)


def test_the_same_seed_gives_the_same_delays():
    def draw() -> list[timedelta]:
        random = Random(1).random
        return [Backoff().delay(attempt, random) for attempt in range(1, 10)]

    assert draw() == draw()
    assert len(set(draw())) == 9


@pytest.mark.parametrize("attempt", [0, -1])
def test_attempts_are_counted_from_one(attempt: int):
    with pytest.raises(ValueError, match="counted from 1"):
        Backoff().ceiling(attempt)


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 0.5},
        {"floor": -SECOND},
        {"floor": 2 * SECOND},
        {"initial": 61 * SECOND},
        {"cap": timedelta(0)},
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, object]):
    with pytest.raises(ValueError, match="backoff: needs"):
        Backoff(**settings)  # type: ignore[arg-type]
