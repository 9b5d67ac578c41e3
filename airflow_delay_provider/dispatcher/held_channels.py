"""Channels of one destination to which nothing can be sent until somebody mends them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.exceptions import DelayError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hold:
    error: str
    failures: int
    since: datetime
    #: When the channel is tried again.
    until: datetime


class HeldChannels:
    """Each has a backoff of its own, so that a missing queue is tried rarely and delays no other channel."""

    def __init__(
        self, loop: str, *, clock: Clock, backoff: Backoff, random: Callable[[], float] = random.random
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._backoff = backoff
        self._random = random
        self._holds: dict[str, _Hold] = {}

    def __bool__(self) -> bool:
        return bool(self._holds)

    def __contains__(self, channel: str) -> bool:
        return channel in self._holds

    def hold(self, channel: str, error: Exception) -> None:
        """Leave the channel alone for a while, and say why."""
        before, now = self._holds.get(channel), self._clock.now()
        failures = before.failures + 1 if before else 1
        pause = self._backoff.delay(failures, self._random)
        self._holds[channel] = _Hold(
            error=f"{type(error).__name__}: {error}",
            failures=failures,
            since=before.since if before else now,
            until=now + pause,
        )
        log.error(
            "%s: messages for channel %s wait; it is tried again in %.1f s: %s",
            self._loop,
            channel,
            pause.total_seconds(),
            error,
            exc_info=None if isinstance(error, DelayError) else error,
        )

    def release(self, channels: Collection[str]) -> None:
        """Use channels again that have taken a message."""
        for channel in channels:
            if self._holds.pop(channel, None) is not None:
                log.info("%s: channel %s takes messages again", self._loop, channel)

    def forget_all_but(self, channels: Collection[str]) -> None:
        """Drop channels that no message waits for."""
        for channel in set(self._holds) - set(channels):
            del self._holds[channel]

    def rested(self) -> list[str]:
        """Return the channels that may be tried again now."""
        now = self._clock.now()
        return [channel for channel, hold in self._holds.items() if hold.until <= now]

    def describe(self) -> dict[str, str]:
        """Return what is wrong with each channel, for ``/health``."""
        return {
            channel: f"messages wait since {hold.since.isoformat(timespec='seconds')}, failures: {hold.failures};"
            f" {hold.error}"
            for channel, hold in list(self._holds.items())
        }
