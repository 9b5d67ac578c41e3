"""The rungs that a delay passes, as a reference for the brokers."""

from __future__ import annotations

from airflow_delay_provider.domain.ladder import Ladder


def path_of(ladder: Ladder, delay_ms: int) -> tuple[int, ...]:
    """Return the hold times, longest first, whose sum is the delay rounded up to the tick."""
    remaining, holds = ladder.round_up(delay_ms), list[int]()
    while hold := ladder.next_hold(remaining):
        holds.append(hold)
        remaining -= hold
    return tuple(holds)
