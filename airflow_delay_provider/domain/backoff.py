"""How long to wait before trying again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter inside the cap.

    With the defaults the delay before retry 1, 2, 3, 4 ... is drawn from 0.5-1, 0.5-2, 0.5-4, 0.5-8 ... up to 0.5-60
    seconds: the ceiling doubles, the floor keeps a retry from firing at once.
    """

    initial: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    cap: timedelta = timedelta(seconds=60)
    #: No retry comes sooner than this.
    floor: timedelta = timedelta(seconds=0.5)

    def __post_init__(self) -> None:
        if not timedelta(0) <= self.floor <= self.initial <= self.cap or self.factor < 1:
            raise ValueError("backoff: needs 0 <= floor <= initial <= cap and factor >= 1")

    def ceiling(self, attempt: int) -> timedelta:
        """Return the longest delay before retry number ``attempt`` (from 1)."""
        if attempt < 1:
            raise ValueError(f"attempt: {attempt} is not counted from 1")
        try:
            return min(self.cap, self.initial * self.factor ** (attempt - 1))
        except OverflowError:
            return self.cap

    def delay(self, attempt: int, random: Callable[[], float]) -> timedelta:
        """Return the delay before retry number ``attempt``; ``random`` gives numbers in [0, 1)."""
        return self.floor + (self.ceiling(attempt) - self.floor) * random()
