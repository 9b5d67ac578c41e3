"""A clock that moves only when a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from threading import Lock

from airflow_delay_provider.domain.message import require_aware

#: Far from the machine's time, so that code which reads the machine's clock is noticed.
START = datetime(2030, 1, 1, tzinfo=UTC)


class SettableClock:
    """Returns the same time until ``advance`` or ``set``; threads may share it."""

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
        """Set the time to ``moment``, which may be in the past, and return it in UTC."""
        moment = require_aware("moment", moment)
        with self._lock:
            self._now = moment
        return moment
