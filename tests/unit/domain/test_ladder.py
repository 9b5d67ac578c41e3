from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.domain.ladder import Ladder
from tests.ladder_path import path_of

HEX_SECONDS = Ladder.of_digits(tick_ms=1000, radix=16, cover_ms=10**10, longest_hold_ms=10**12)
#: The four queues of the blog that the idea comes from: 2, 8, 32 and 128 seconds.
FOURS = Ladder((2_000, 8_000, 32_000, 128_000))


@st.composite
def ladders_of_digits(draw: st.DrawFn) -> tuple[Ladder, int, int]:
    """A ladder with its radix, and the longest delay that has a path of one hold a digit."""
    tick_ms, radix = draw(st.integers(1, 60_000)), draw(st.integers(2, 20))
    levels = draw(st.integers(1, 6))
    top = tick_ms * radix ** (levels - 1)
    ladder = Ladder.of_digits(tick_ms=tick_ms, radix=radix, cover_ms=top, longest_hold_ms=top * radix)
    return ladder, radix, top * radix - tick_ms


@pytest.mark.parametrize(
    ("delay_ms", "path"),
    [
        (-5_000, ()),
        (0, ()),
        (1, (1_000,)),
        (1_000, (1_000,)),
        (1_001, (2_000,)),
        (15_000, (15_000,)),
        (16_000, (16_000,)),
        (17_000, (16_000, 1_000)),
        (0x10A * 1000, (0x100 * 1000, 0xA * 1000)),
        (0xFFFF * 1000, (0xF000 * 1000, 0xF00 * 1000, 0xF0 * 1000, 0xF * 1000)),
    ],
)
def test_a_delay_rests_once_for_each_digit_that_is_not_zero(delay_ms: int, path: tuple[int, ...]) -> None:
    """C5, C8: no place is used twice, where a ladder of fours uses each up to three times."""
    assert path_of(HEX_SECONDS, delay_ms) == path


def test_the_ladder_of_the_blog_is_one_of_them() -> None:
    """C5, C6, C9: 255 seconds are held for 256, the accuracy of the shortest hold."""
    assert path_of(FOURS, 254_000) == (128_000, *3 * (32_000,), *3 * (8_000,), *3 * (2_000,))
    assert sum(path_of(FOURS, 255_000)) == 256_000


@given(ladders_of_digits(), st.data())
def test_the_holds_of_a_path_sum_to_the_delay_rounded_up(made: tuple[Ladder, int, int], data: st.DataObject) -> None:
    """C6, C9: at least the delay, and less than a tick more."""
    ladder, _, longest_ms = made
    delay_ms = data.draw(st.integers(0, longest_ms))
    held_ms = sum(path_of(ladder, delay_ms))
    assert held_ms == ladder.round_up(delay_ms)
    assert delay_ms <= held_ms < delay_ms + ladder.tick_ms


@given(ladders_of_digits(), st.data())
def test_a_path_falls_and_has_at_most_one_hold_a_digit(made: tuple[Ladder, int, int], data: st.DataObject) -> None:
    """C8, C10: how often a message moves grows with the number of digits and not with the delay."""
    ladder, radix, longest_ms = made
    delay_ms = data.draw(st.integers(0, longest_ms))
    path = path_of(ladder, delay_ms)
    digits = digits_of(ladder.round_up(delay_ms) // ladder.tick_ms, radix)
    assert list(path) == sorted(set(path), reverse=True)
    assert len(path) == sum(digit > 0 for digit in digits)


@given(st.sets(st.integers(1, 1000), min_size=1), st.integers(1, 5_000), st.integers(-10, 10**7))
def test_any_list_of_multiples_of_a_tick_is_a_ladder(multiples: set[int], tick_ms: int, delay_ms: int) -> None:
    """C9, E12: greedy, so the holds never rise, and nothing remains."""
    ladder = Ladder(tuple(tick_ms * each for each in sorted(multiples | {1})))
    path = path_of(ladder, delay_ms)
    assert sum(path) == ladder.round_up(delay_ms) >= delay_ms
    assert list(path) == sorted(path, reverse=True)


@given(st.lists(st.integers(1, 10**6), min_size=1, unique=True).map(sorted), st.integers(-10, 2 * 10**6))
def test_the_next_hold_is_the_longest_that_is_not_too_long(holds_ms: list[int], remaining_ms: int) -> None:
    """C7: what remains decides, at every step."""
    fitting = [hold for hold in holds_ms if hold <= remaining_ms]
    assert Ladder(tuple(holds_ms)).next_hold(remaining_ms) == (fitting[-1] if fitting else None)


def test_holds_that_no_broker_keeps_are_left_out() -> None:
    ladder = Ladder.of_digits(tick_ms=1, radix=16, cover_ms=10**6, longest_hold_ms=0x300)
    assert ladder.holds_ms[-1] == 0x300
    assert sum(path_of(ladder, 0xFFF)) == 0xFFF


@pytest.mark.parametrize("holds_ms", [(), (0, 1), (-1,), (2, 1), (1, 1)])
def test_holds_that_make_no_ladder_are_refused(holds_ms: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="different holds of at least 1 ms, in ascending order"):
        Ladder(holds_ms)


@pytest.mark.parametrize(("tick_ms", "radix"), [(0, 16), (-1, 16), (1, 1), (1, 0)])
def test_digits_that_make_no_ladder_are_refused(tick_ms: int, radix: int) -> None:
    with pytest.raises(ValueError, match="a tick of at least 1 ms and a radix of at least 2"):
        Ladder.of_digits(tick_ms=tick_ms, radix=radix, cover_ms=1000, longest_hold_ms=1000)


def digits_of(number: int, radix: int) -> list[int]:
    digits = []
    while number:
        number, digit = divmod(number, radix)
        digits.append(digit)
    return digits
