"""What the loops tell the world, kept out of their logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Observer(Protocol):
    """Told of what the loops did; must not raise."""

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Messages were handed to their channels, this late."""
        ...

    def failed(self, loop: str) -> None:
        """A run of a loop, or its work for one channel, ended with an error."""
        ...


class PrometheusObserver:
    """Keeps the numbers that ``/metrics`` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._dispatched = Counter(
            "delay_dispatched", "Messages handed to their channel", ["channel"], registry=self.registry
        )
        self._errors = Counter(
            "delay_errors",
            "Runs of a loop, or of its work for one channel, that failed",
            ["loop"],
            registry=self.registry,
        )
        self._lateness = Histogram(
            "delay_lateness_seconds",
            "How long after its due time a message was handed to its channel",
            buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600),
            registry=self.registry,
        )
        self.held_channels = Gauge(
            "delay_held_channels",
            "Channels whose messages wait until somebody mends what /health says",
            ["loop"],
            registry=self.registry,
        )
        self.scheduled = Gauge("delay_scheduled", "Messages that wait", registry=self.registry)
        self.overdue = Gauge(
            "delay_overdue_seconds", "How long the first waiting message is overdue", registry=self.registry
        )

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Count messages and their lateness."""
        for channel, count in by_channel.items():
            self._dispatched.labels(channel).inc(count)
        for late in lateness_ms:
            self._lateness.observe(late / 1000)

    def failed(self, loop: str) -> None:
        """Count an error."""
        self._errors.labels(loop).inc()

    def render(self) -> bytes:
        """Return all numbers in Prometheus' text form."""
        return generate_latest(self.registry)
