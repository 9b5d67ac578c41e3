"""What all loops have in common: they run, pause, back off on errors, and can say how they are."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from airflow_delay_provider.dispatcher.observing import Observer
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.exceptions import DelayError

log = logging.getLogger(__name__)

#: A loop that has not finished a run for so long is not well.
STALLED_SECONDS = 60.0


class Loop(Protocol):
    """One kind of work, done again and again."""

    name: str

    def run_once(self) -> float:
        """Do what there is to do now, in bounded time, and return the seconds until the next look."""
        ...


@runtime_checkable
class Closable(Protocol):
    """A loop with clients of its own; a client belongs to the thread that uses it."""

    def close(self) -> None:
        """Finish what is begun and let go."""
        ...


@dataclass(kw_only=True, slots=True)
class LoopHealth:
    """How a loop is."""

    #: Length of the longest pause it has asked for.
    pause: float = 0.0
    ended_at: float | None = None
    failures: int = 0
    error: str | None = None

    @property
    def well(self) -> bool:
        """Whether the last run was good and not too long ago."""
        return self.failures == 0 and (
            self.ended_at is None or time.monotonic() - self.ended_at < STALLED_SECONDS + self.pause
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what ``/health`` shows."""
        ended = None
        if self.ended_at is not None:
            ended = datetime.fromtimestamp(time.time() - (time.monotonic() - self.ended_at), UTC).isoformat()
        return {"well": self.well, "last_run_ended_at": ended, "failures": self.failures, "error": self.error}


class LoopThread:
    """Runs one loop in a thread of its own until it is told to stop; an error pauses it, nothing ends it."""

    def __init__(self, loop: Loop, *, stop: threading.Event, backoff: Backoff, observers: Sequence[Observer]) -> None:
        self.loop = loop
        self.health = LoopHealth()
        self._stop = stop
        self._backoff = backoff
        self._observers = observers
        self._thread = threading.Thread(target=self._run, name=f"delay-{loop.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the current run to end, and for the loop to be closed, and return whether it is."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = self._run_guarded(self.loop.run_once)
            if pause > 0:
                self._stop.wait(pause)
        if isinstance(self.loop, Closable):
            self.loop.close()

    def _run_guarded(self, run_once: Callable[[], float]) -> float:
        try:
            pause = run_once()
        except Exception as error:  # noqa: BLE001 - whatever it was, the next run may succeed
            return self._note_failure(error)
        if self.health.failures:
            log.info("%s works again after %d failures", self.loop.name, self.health.failures)
        self.health.failures, self.health.error = 0, None
        self.health.pause = max(self.health.pause, pause)
        self.health.ended_at = time.monotonic()
        return pause

    def _note_failure(self, error: Exception) -> float:
        self.health.failures += 1
        self.health.error = f"{type(error).__name__}: {error}"
        pause = self._backoff.delay(self.health.failures, random.random).total_seconds()
        # Our own errors say all in one sentence; anything else is a defect and needs its traceback.
        log.error(
            "%s failed and tries again in %.1f s: %s",
            self.loop.name,
            pause,
            error,
            exc_info=not isinstance(error, DelayError),
        )
        for observer in self._observers:
            observer.failed(self.loop.name)
        return pause
