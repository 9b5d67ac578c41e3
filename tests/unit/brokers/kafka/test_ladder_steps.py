"""How often a message is written again on its way, with the rungs that Kafka has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import SLACK_MS
from airflow_delay_provider.brokers.kafka.topology import TICK_MS, Topology
from airflow_delay_provider.domain.ladder import Ladder
from tests.ladder_path import path_of
from tests.unit.brokers.kafka.bench import Bench

LADDERS = {radix: Topology(radix=radix).ladder for radix in (2, 4, 16)}
SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
TEN_YEARS_MS = 3_653 * DAY_MS


def digits_of(delay_ms: int, radix: int) -> list[int]:
    """Write a delay in ticks, the last digit first."""
    ticks, digits = -(-delay_ms // TICK_MS), list[int]()
    while ticks:
        ticks, digit = divmod(ticks, radix)
        digits.append(digit)
    return digits


def most_steps(ladder: Ladder, radix: int, delay_ms: int) -> int:
    """One for each digit below the longest rests, and as many of those as the delay contains."""
    top_ms = ladder.holds_ms[-1]
    return delay_ms // top_ms + len(digits_of(min(delay_ms, top_ms), radix))


@pytest.mark.parametrize(
    ("delay_ms", "steps", "most"),
    [
        (5 * SECOND_MS, {2: 2, 4: 1, 16: 1}, {2: 2, 4: 1, 16: 1}),
        (5 * MINUTE_MS, {2: 4, 4: 4, 16: 2}, {2: 8, 4: 4, 16: 2}),
        (HOUR_MS, {2: 4, 4: 3, 16: 2}, {2: 11, 4: 6, 16: 3}),
        (DAY_MS, {2: 5, 4: 4, 16: 3}, {2: 16, 4: 8, 16: 4}),
        (30 * DAY_MS, {2: 8, 4: 6, 16: 5}, {2: 21, 4: 11, 16: 6}),
    ],
    ids=["5 s", "5 min", "1 h", "24 h", "30 d"],
)
def test_a_delay_takes_few_steps(delay_ms: int, steps: dict[int, int], most: dict[int, int]) -> None:
    """E2, E3, E10: where one pending topic would be written again and again.

    Exactly so long, and at most; a step that is a millisecond late changes all digits behind it.
    """
    assert {radix: len(path_of(ladder, delay_ms)) for radix, ladder in LADDERS.items()} == steps
    assert {radix: most_steps(ladder, radix, delay_ms) for radix, ladder in LADDERS.items()} == most


@pytest.mark.parametrize("delay_ms", [5 * SECOND_MS, 5 * MINUTE_MS, HOUR_MS, DAY_MS, 30 * DAY_MS])
@pytest.mark.parametrize("radix", LADDERS)
def test_a_partition_makes_as_many_steps_as_the_ladder_says(radix: int, delay_ms: int) -> None:
    """E3, E7"""
    bench = Bench(Topology(radix=radix))
    bench.schedule("m1", delay_ms)
    bench.pass_to(delay_ms)
    assert bench.kafka.rests[b"m1"] == len(path_of(LADDERS[radix], delay_ms - SLACK_MS - TICK_MS + 1))
    assert bench.delivered == [("m1", delay_ms)]


@pytest.mark.parametrize("radix", LADDERS)
@given(delay_ms=st.integers(0, DAY_MS) | st.integers(0, TEN_YEARS_MS))
def test_the_steps_of_a_delay_are_never_early_and_at_most_a_tick_late(radix: int, delay_ms: int) -> None:
    """C9, D4, E12: for any delay up to ten years."""
    held_ms = sum(path_of(LADDERS[radix], delay_ms))
    assert delay_ms <= held_ms < delay_ms + TICK_MS


@pytest.mark.parametrize("radix", LADDERS)
@given(delay_ms=st.integers(0, DAY_MS) | st.integers(0, TEN_YEARS_MS))
def test_the_number_of_steps_is_bounded_by_the_digits_of_the_delay(radix: int, delay_ms: int) -> None:
    """E3, E10: it grows with the logarithm of the delay, up to the longest rests."""
    assert len(path_of(LADDERS[radix], delay_ms)) <= most_steps(LADDERS[radix], radix, delay_ms)


@pytest.mark.parametrize("radix", LADDERS)
@given(data=st.data(), delay_ms=st.integers(0, DAY_MS) | st.integers(0, TEN_YEARS_MS))
def test_the_bound_holds_however_late_each_step_is(radix: int, data: st.DataObject, delay_ms: int) -> None:
    """E3, E7: after a pause a dispatcher has less to do, and never repeats a wait."""
    ladder, remaining_ms, rests = LADDERS[radix], delay_ms, list[int]()
    while hold_ms := ladder.next_hold(remaining_ms):
        rests.append(hold_ms)
        remaining_ms -= hold_ms + data.draw(st.integers(0, 5) | st.integers(0, 10 * DAY_MS))
    assert len(rests) <= most_steps(ladder, radix, delay_ms)
    shorter = [hold_ms for hold_ms in rests if hold_ms < ladder.holds_ms[-1]]
    assert len(shorter) == len(set(shorter))
    assert rests == sorted(rests, reverse=True)


@pytest.mark.parametrize(("radix", "steps"), [(2, 29), (4, 18), (16, 9)])
def test_two_years_take_a_few_steps(radix: int, steps: int) -> None:
    """E2, E10: with buckets up to 256 seconds it would be written a quarter of a million times."""
    worst = max(len(path_of(LADDERS[radix], 730 * DAY_MS + ms)) for ms in range(0, HOUR_MS, TICK_MS))
    assert worst == steps
    assert 730 * DAY_MS // (256 * SECOND_MS) > 246_000


@pytest.mark.parametrize("radix", LADDERS)
def test_the_boundaries_of_every_range_belong_to_it(radix: int) -> None:
    """E4, E5, E12"""
    holds_ms = LADDERS[radix].holds_ms
    for shorter, longer in zip((None, *holds_ms), holds_ms, strict=False):
        assert LADDERS[radix].next_hold(longer - 1) == shorter
        assert LADDERS[radix].next_hold(longer) == longer
        assert LADDERS[radix].next_hold(longer + 1) == longer
