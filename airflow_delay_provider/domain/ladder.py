"""A delay as a sum of fixed hold times, for brokers that cannot delay each message by its own time.

A queue or topic that holds every message for the same time releases them in the order of arrival, so only its first
message has to be checked. Any delay is made of such rungs, one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ladder:
    """Hold times in milliseconds, ascending; the first is the tick, to which delays are rounded up."""

    holds_ms: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.holds_ms or self.holds_ms[0] < 1 or list(self.holds_ms) != sorted(set(self.holds_ms)):
            raise ValueError("a ladder needs different holds of at least 1 ms, in ascending order")

    @classmethod
    def of_digits(cls, *, tick_ms: int, radix: int, cover_ms: int, longest_hold_ms: int) -> Ladder:
        """Return the holds ``digit * radix**level * tick`` for as many levels as ``cover_ms`` needs.

        A delay then needs one hold for each of its digits that is not zero. Holds above ``longest_hold_ms`` are left
        out.
        """
        if tick_ms < 1 or radix < 2:
            raise ValueError("a ladder of digits needs a tick of at least 1 ms and a radix of at least 2")
        return cls(tuple(_digit_holds(tick_ms, radix, cover_ms, longest_hold_ms)))

    @property
    def tick_ms(self) -> int:
        """The shortest hold time."""
        return self.holds_ms[0]

    def next_hold(self, remaining_ms: int) -> int | None:
        """Return the longest hold time that is not longer than the remaining delay; None below one tick."""
        position = bisect_right(self.holds_ms, remaining_ms)
        return self.holds_ms[position - 1] if position else None

    def round_up(self, delay_ms: int) -> int:
        """Return the delay as a whole number of ticks, never less than asked for."""
        return max(0, -(-delay_ms // self.tick_ms) * self.tick_ms)


def _digit_holds(tick_ms: int, radix: int, cover_ms: int, longest_hold_ms: int) -> Iterable[int]:
    unit = tick_ms
    while unit <= longest_hold_ms:
        yield from (hold for digit in range(1, radix) if (hold := digit * unit) <= longest_hold_ms)
        unit *= radix
        if unit > cover_ms:
            return
