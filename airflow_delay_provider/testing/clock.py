"""A clock that stands still until it is told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from threading import Lock

from airflow_delay_provider.domain.message import require_aware

#: Far from the machine's clock, so that a place which still reads that one shows.
START = datetime(2030, 1, 1, tzinfo=UTC)


class SettableClock:
    """Shows the same time until ``advance`` or ``set``; may be shared by threads."""

    def __init__(self, start: datetime = START) -> None:
        self._now = require_aware("start", start)
        self._lock = Lock()

    def now(self) -> datetime:
        """Return the current time as an aware UTC datetime."""
        with self._lock:
            return self._now

    def advance(self, delta: timedelta) -> datetime:
        """Move forward by ``delta`` and return the new time."""
        if delta < timedelta(0):
            raise ValueError(f"delta: {delta} goes back; use set() to turn the clock back")
        with self._lock:
            self._now += delta
            return self._now

    def set(self, moment: datetime) -> datetime:
        """Show ``moment``, which may lie in the past, and return it in UTC."""
        moment = require_aware("moment", moment)
        with self._lock:
            self._now = moment
        return moment
