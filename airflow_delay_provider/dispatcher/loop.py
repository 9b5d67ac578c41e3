"""What all loops of a dispatcher share: their context; they run, pause, back off on errors and report their health."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.notices import LOOK_SECONDS
from airflow_delay_provider.dispatcher.monitoring import Observer
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import Clock, floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import DelayError

log = logging.getLogger(__name__)

#: A loop is stalled if it has not finished a run for this long.
STALLED_SECONDS = 60.0
#: A run that takes this long will not end: time-outs of brokers and databases are shorter. Only a restart helps.
HUNG_SECONDS = 600.0


class Loop(Protocol):
    """One task of the dispatcher, run again and again."""

    name: str

    def run_once(self) -> float:
        """Do what there is to do now, in bounded time, and return the seconds until the next run."""
        ...


@runtime_checkable
class Closable(Protocol):
    """A loop with its own clients; a client belongs to the thread that uses it."""

    def close(self) -> None:
        """Finish and close the clients."""
        ...


@runtime_checkable
class Ending(Protocol):
    """A loop that may end."""

    is_over: bool


@runtime_checkable
class Woken(Protocol):
    """A loop whose pause ends when a message may be due sooner than it knows."""

    #: The shortest time between two runs that notices cause, in seconds.
    notice_interval: float


@runtime_checkable
class Troubled(Protocol):
    """A loop of which a part may fail while the rest works."""

    def troubles(self) -> dict[str, str]:
        """Return what is wrong, by the part that fails."""
        ...


@dataclass(kw_only=True, slots=True)
class LoopHealth:
    """The health of a loop."""

    #: The longest pause it has asked for, in seconds.
    pause: float = 0.0
    began_at: float = field(default_factory=time.monotonic)
    #: When the current run began; None between runs.
    busy_since: float | None = None
    #: Whether a run has ended, even if it failed.
    has_run: bool = False
    #: The end of the last successful run.
    ended_at: float | None = None
    failures: int = 0
    error: str | None = None
    #: Parts of its work that fail, and why.
    troubles: Callable[[], dict[str, str]] = dict

    @property
    def well(self) -> bool:
        """Whether the last run succeeded and is not too long ago; the first one must end in time, too."""
        return self.failures == 0 and not self.is_stalled and not self.troubles()

    @property
    def problem(self) -> str | None:
        """What is wrong, in one sentence; None if nothing is."""
        if self.error is not None:
            return self.error
        if self.is_stalled:
            return f"a run has not ended for {STALLED_SECONDS:g} s or more; the database or the broker does not respond"
        return self.trouble

    @property
    def trouble(self) -> str | None:
        """What is wrong with the first part that fails, and how many more do."""
        for what, why in (troubles := self.troubles()).items():
            return f"{what}: {why}" + (f" (and {len(troubles) - 1} more)" if len(troubles) > 1 else "")
        return None

    @property
    def is_stalled(self) -> bool:
        """Whether the current run takes too long."""
        since = self.began_at if self.ended_at is None else self.ended_at
        return time.monotonic() - since >= STALLED_SECONDS + self.pause

    @property
    def is_hung(self) -> bool:
        """Whether the current run will not end by itself."""
        since = self.busy_since
        return since is not None and time.monotonic() - since >= HUNG_SECONDS

    @property
    def seconds_since_success(self) -> float | None:
        """How long ago a run succeeded; None if none has."""
        return None if self.ended_at is None else time.monotonic() - self.ended_at

    def as_dict(self) -> dict[str, Any]:
        """Return what ``/health`` shows."""
        ended, ago = None, self.seconds_since_success
        if ago is not None:
            ended = datetime.fromtimestamp(time.time() - ago, UTC).isoformat()
        shown = {"well": self.well, "last_run_ended_at": ended, "failures": self.failures, "error": self.problem}
        troubles = self.troubles()
        return shown | {"troubles": troubles} if troubles else shown


class LoopThread:
    """Runs one loop in its own thread until ``stop`` is set; an error pauses it and never ends it."""

    def __init__(self, loop: Loop, *, stop: threading.Event, backoff: Backoff, observers: Sequence[Observer]) -> None:
        self.loop = loop
        self.health = LoopHealth(troubles=loop.troubles) if isinstance(loop, Troubled) else LoopHealth()
        self._stop = stop
        self._backoff = backoff
        self._observers = observers
        self._noticed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"delay-{loop.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the current run has ended and the loop is closed; return whether it is."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """End the pause of a loop that wants to be woken, and of any loop when the dispatcher stops."""
        self._noticed.set()

    @property
    def is_alive(self) -> bool:
        """Whether it goes on running, as far as known, or has ended as it should."""
        has_thread = self._thread.is_alive() or self._is_over or self._stop.is_set()
        return has_thread and not self.health.is_hung

    @property
    def has_ended(self) -> bool:
        """Whether the loop has ended by itself."""
        return not self._thread.is_alive() and self._is_over

    @property
    def _is_over(self) -> bool:
        return isinstance(self.loop, Ending) and self.loop.is_over

    def _run(self) -> None:
        while not self._stop.is_set() and not self._is_over:
            began_at = time.monotonic()
            # Before the run, so that no notice of what it does not see is lost.
            self._noticed.clear()
            pause = self._run_guarded(self.loop.run_once)
            if pause > 0:
                self._pause(pause, began_at)
        if isinstance(self.loop, Closable):
            self.loop.close()

    def _pause(self, seconds: float, began_at: float) -> None:
        """Pause; a notice ends it, unless the pause follows an error or the last run has only just begun."""
        if self.health.failures or not isinstance(self.loop, Woken):
            self._stop.wait(seconds)
            return
        until = time.monotonic() + seconds
        if self._noticed.wait(seconds):
            next_run = min(until, began_at + self.loop.notice_interval)
            self._stop.wait(max(0.0, next_run - time.monotonic()))

    def _run_guarded(self, run_once: Callable[[], float]) -> float:
        self.health.busy_since = time.monotonic()
        try:
            pause = run_once()
        except Exception as error:  # noqa: BLE001 - the next run may succeed
            return self._record_failure(error)
        finally:
            self.health.busy_since, self.health.has_run = None, True
        if self.health.failures:
            log.info("%s succeeds again after %d failures", self.loop.name, self.health.failures)
        self.health.failures, self.health.error = 0, None
        self.health.pause = max(self.health.pause, pause)
        self.health.ended_at = time.monotonic()
        return pause

    def _record_failure(self, error: Exception) -> float:
        self.health.failures += 1
        self.health.error = f"{type(error).__name__}: {error}"
        pause = self._backoff.delay(self.health.failures, random.random).total_seconds()
        # Errors of this package explain themselves; any other is a defect and needs its traceback.
        log.error(
            "%s failed, next attempt in %.1f s: %s",
            self.loop.name,
            pause,
            error,
            exc_info=not isinstance(error, DelayError),
        )
        for observer in self._observers:
            observer.failed(self.loop.name)
        return pause


@dataclass(frozen=True, kw_only=True)
class Context:
    """The ledger, the clock, the settings and the observers of a dispatcher, which its loops share."""

    ledger: Ledger
    clock: Clock
    config: DispatcherConfig
    observers: Sequence[Observer] = ()
    bucket: TokenBucket | None = None
    #: Whether a message that is due soon is announced.
    is_announced: Callable[[], bool] = lambda: False

    @property
    def poll_seconds(self) -> float:
        """How long a loop pauses that must look again soon."""
        return self.config.poll_interval.total_seconds()

    @property
    def idle_seconds(self) -> float:
        """How long an idle loop pauses at most: a message that is due sooner may be scheduled meanwhile."""
        return max(LOOK_SECONDS, self.poll_seconds) if self.is_announced() else self.poll_seconds

    def now_ms(self) -> int:
        """Return the current time, rounded down so that nothing is due early."""
        return floor_ms(self.clock.now())

    def embedded_allowance(self) -> tuple[int, float]:
        """Return how many embedded messages may be dispatched now, or the seconds until the next check."""
        with self.ledger.read() as connection:
            due_ms = delivery.next_due_ms(connection)
        return (0, self.idle_seconds) if due_ms is None else self.allowance(due_ms)

    def allowance(self, due_ms: int) -> tuple[int, float]:
        """Return how many messages may be dispatched now, the first being due at ``due_ms``, or how long to wait."""
        until_due = (from_ms(due_ms) - self.clock.now()).total_seconds()
        if until_due > 0:
            return 0, min(self.idle_seconds, until_due)
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
        if not by_channel:
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
