"""What all loops of one dispatcher share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from airflow_delay_provider.dispatcher.config import DispatcherConfig
from airflow_delay_provider.dispatcher.observing import Observer
from airflow_delay_provider.dispatcher.rate import TokenBucket
from airflow_delay_provider.domain.clock import Clock, floor_ms, from_ms
from airflow_delay_provider.ledger import delivery
from airflow_delay_provider.ledger.database import Ledger


@dataclass(frozen=True, kw_only=True)
class Context:
    """The ledger, the clock, the settings, and who is told."""

    ledger: Ledger
    clock: Clock
    config: DispatcherConfig
    observers: Sequence[Observer] = ()
    bucket: TokenBucket | None = None

    @property
    def poll_seconds(self) -> float:
        """How long a loop with nothing to do waits."""
        return self.config.poll_interval.total_seconds()

    def now_ms(self) -> int:
        """Return the current time, rounded down so that nothing is due early."""
        return floor_ms(self.clock.now())

    def look(self) -> tuple[int, float]:
        """Return how many messages for channels here may be taken now, or the seconds until the next look."""
        with self.ledger.read() as connection:
            due_ms = delivery.next_due_ms(connection)
        return (0, self.poll_seconds) if due_ms is None else self.allowance(due_ms)

    def allowance(self, due_ms: int) -> tuple[int, float]:
        """Return how many messages may be taken when the first is due then, or the seconds until the next look."""
        until_due = (from_ms(due_ms) - self.clock.now()).total_seconds()
        if until_due > 0:
            # Something sooner may be scheduled meanwhile, so never for long.
            return 0, min(self.poll_seconds, until_due)
        if self.bucket is None:
            return self.config.batch, 0.0
        allowed = min(self.config.batch, self.bucket.available())
        return allowed, 0.0 if allowed else self.bucket.seconds_until_one()

    def note_dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Count messages of the ledger that were dispatched, for the rate limit, and tell the observers."""
        if self.bucket is not None:
            self.bucket.take(len(lateness_ms))
        self.tell_dispatched(by_channel, lateness_ms)

    def tell_dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Tell the observers of dispatched messages."""
        if not lateness_ms:
            return
        for observer in self.observers:
            observer.dispatched(by_channel, lateness_ms)
