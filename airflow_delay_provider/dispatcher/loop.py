"""What all loops have in common: they run, pause, back off on errors and report their health."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from airflow_delay_provider.dispatcher.monitoring import Observer
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import DelayError

log = logging.getLogger(__name__)

#: A loop is stalled if it has not finished a run for this long.
STALLED_SECONDS = 60.0


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
        self._thread = threading.Thread(target=self._run, name=f"delay-{loop.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the current run has ended and the loop is closed; return whether it is."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether the loop has ended by itself."""
        return not self._thread.is_alive() and self._is_over

    @property
    def _is_over(self) -> bool:
        return isinstance(self.loop, Ending) and self.loop.is_over

    def _run(self) -> None:
        while not self._stop.is_set() and not self._is_over:
            pause = self._run_guarded(self.loop.run_once)
            if pause > 0:
                self._stop.wait(pause)
        if isinstance(self.loop, Closable):
            self.loop.close()

    def _run_guarded(self, run_once: Callable[[], float]) -> float:
        try:
            pause = run_once()
        except Exception as error:  # noqa: BLE001 - the next run may succeed
            return self._record_failure(error)
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
