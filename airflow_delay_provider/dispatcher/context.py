"""What all loops of one dispatcher share, and the limit on messages per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.dispatcher.monitoring import Observer
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.domain.clock import Clock, floor_ms, from_ms


@dataclass(frozen=True, kw_only=True)
class Context:
    """The ledger, the clock, the settings and the observers."""

    ledger: Ledger
    clock: Clock
    config: DispatcherConfig
    observers: Sequence[Observer] = ()
    bucket: TokenBucket | None = None

    @property
    def poll_seconds(self) -> float:
        """How long an idle loop pauses."""
        return self.config.poll_interval.total_seconds()

    def now_ms(self) -> int:
        """Return the current time, rounded down so that nothing is due early."""
        return floor_ms(self.clock.now())

    def embedded_allowance(self) -> tuple[int, float]:
        """Return how many embedded messages may be dispatched now, or the seconds until the next check."""
        with self.ledger.read() as connection:
            due_ms = delivery.next_due_ms(connection)
        return (0, self.poll_seconds) if due_ms is None else self.allowance(due_ms)

    def allowance(self, due_ms: int) -> tuple[int, float]:
        """Return how many messages may be dispatched now, the first being due at ``due_ms``, or how long to wait."""
        until_due = (from_ms(due_ms) - self.clock.now()).total_seconds()
        if until_due > 0:
            # Never pause for long: a message that is due sooner may be scheduled meanwhile.
            return 0, min(self.poll_seconds, until_due)
        if self.bucket is None:
            return self.config.batch, 0.0
        allowed = min(self.config.batch, self.bucket.available())
        return allowed, 0.0 if allowed else self.bucket.seconds_until_one()

    def count_dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Count dispatched messages of the ledger towards the rate limit, and report them."""
        if self.bucket is not None:
            self.bucket.take(len(lateness_ms))
        self.report_dispatched(by_channel, lateness_ms)

    def report_dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Report dispatched messages to the observers."""
        if not lateness_ms:
            return
        for observer in self.observers:
            observer.dispatched(by_channel, lateness_ms)


class TokenBucket:
    """A token bucket: allows ``rate`` messages per second, and a tenth of that at once."""

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
            # Loops that check at the same moment may take more than there is.
            return max(0, int(self._tokens))

    def take(self, n: int) -> None:
        """Take ``n`` tokens."""
        with self._lock:
            self._tokens -= n

    def seconds_until_one(self) -> float:
        """Return how long until the next message may go."""
        return max(0.0, (1 - self._tokens) / self._rate)
