"""Where time comes from, and its one representation in storage: whole milliseconds since the epoch."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ONE_MS = timedelta(milliseconds=1)


class Clock(Protocol):
    """The only source of the current time."""

    def now(self) -> datetime:
        """Return the current time as an aware UTC datetime."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> datetime:
        """Return the current time as an aware UTC datetime."""
        return datetime.fromtimestamp(time.time(), UTC)


def ceil_ms(moment: datetime) -> int:
    """Milliseconds since the epoch, rounded up: a due time must never move earlier."""
    return -((EPOCH - moment) // ONE_MS)


def floor_ms(moment: datetime) -> int:
    """Milliseconds since the epoch, rounded down: "now" must never run ahead."""
    return (moment - EPOCH) // ONE_MS


def from_ms(milliseconds: int) -> datetime:
    """Return the aware UTC datetime of milliseconds since the epoch."""
    return EPOCH + timedelta(milliseconds=milliseconds)
