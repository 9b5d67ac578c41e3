"""A limit on messages a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Lets ``rate`` messages a second through, and up to a tenth of that at once."""

    def __init__(self, rate: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._capacity = max(1.0, rate / 10)
        self._tokens = self._capacity
        self._now = now
        self._filled_at = now()
        self._lock = threading.Lock()

    def available(self) -> int:
        """Return how many messages may go now."""
        with self._lock:
            now = self._now()
            self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self._rate)
            self._filled_at = now
            # Loops that look at the same moment may take more than there is.
            return max(0, int(self._tokens))

    def take(self, n: int) -> None:
        """Count ``n`` messages as gone."""
        with self._lock:
            self._tokens -= n

    def seconds_until_one(self) -> float:
        """Return how long until the next message may go."""
        return max(0.0, (1 - self._tokens) / self._rate)
