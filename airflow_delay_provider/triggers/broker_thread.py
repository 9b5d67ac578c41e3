"""Shared by all triggers: one thread and one broker client for each connection, and the pause before a task resumes."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.hooks.delay import DelayHook

if TYPE_CHECKING:
    #: Class of the thread, event loop, connection id and hold.
    Key: TypeAlias = tuple[type["BrokerThread"], asyncio.AbstractEventLoop, str, str | None]
    from airflow.triggers.base import BaseTrigger

log = logging.getLogger(__name__)

#: Time for the scheduler's own loop, after the exit of the deferring process was noticed.
MARGIN_SECONDS = 5.0


class BrokerThread(ABC):
    """Makes the blocking broker calls for many triggers.

    The thread calls ``poll`` in a loop and passes the results to the event loop, where the triggers wait. After an
    outage it opens the broker again, which also picks up a changed password. It stops when the last trigger has left.
    Blocking calls into Airflow, such as reading the connection, are allowed here: this is not the event loop's thread.
    """

    #: Seconds between two calls of ``poll``.
    interval: float
    #: Pauses between attempts during an outage.
    outage = Backoff()

    _running: ClassVar[dict[Key, BrokerThread]] = {}

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        self.conn_id = conn_id
        self.hold = hold
        self.loop = loop
        self.users = 0
        self.thread = threading.Thread(target=self._run, name=f"{type(self).__name__}-{conn_id}", daemon=True)
        self._stop = threading.Event()
        self._poll_now = threading.Event()
        self._has_polled = False
        self._failures = 0
        self._failing_since = 0.0

    @classmethod
    @contextmanager
    def shared(cls, conn_id: str, *, hold: str | None = None) -> Iterator[Self]:
        """Use the one thread that this event loop has for a connection and hold."""
        loop = asyncio.get_running_loop()
        key = (cls, loop, conn_id, hold)
        shared = cls._running.get(key)
        if not isinstance(shared, cls):
            shared = cls._running[key] = cls(conn_id, loop, hold=hold)
            shared.thread.start()
        shared.users += 1
        try:
            yield shared
        finally:
            shared.users -= 1
            if not shared.users:
                shared.leave()

    def leave(self) -> None:
        """Stop because the last trigger has left; runs on the event loop."""
        self.stop()

    def stop(self) -> None:
        """Stop the thread after its current call; runs on the event loop, or once that is closed."""
        key = (type(self), self.loop, self.conn_id, self.hold)
        if self._running.get(key) is self:
            del self._running[key]
        self._stop.set()
        self._poll_now.set()

    def poll_now(self) -> None:
        """Call ``poll`` without waiting for the interval; does not shorten the pauses of an outage."""
        self._poll_now.set()

    @abstractmethod
    def poll(self, hook: DelayHook) -> bool:
        """Make the blocking calls of one round and return whether more is ready now; runs in the thread."""

    def release_resources(self) -> None:  # noqa: B027 - most hold nothing
        """Release what the broker gave before it is closed; runs in the thread."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Raise ``error`` in every waiting trigger; runs on the event loop."""

    def call_on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Run ``function`` on the event loop, and stop if that is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self.stop()

    def _run(self) -> None:
        hook = DelayHook(self.conn_id, hold=self.hold)
        while not self._stop.is_set():
            self._poll_now.clear()
            try:
                more = self.poll(hook)
            except Exception as error:  # noqa: BLE001 - triggers survive any error of a broker's client
                self._close(hook)
                if isinstance(error, ConfigurationError) and not self._has_polled:
                    self.call_on_loop(self._give_up, error)
                    break
                self._stop.wait(self._back_off(error))
            else:
                self._record_success()
                if not more:
                    self._poll_now.wait(self.interval)
        self._close(hook)

    def _back_off(self, error: Exception) -> float:
        self._failures += 1
        if self._failures == 1:
            self._failing_since = time.monotonic()
            log.warning("%s: the broker does not answer; tasks keep waiting: %s", self.conn_id, error)
        return self.outage.delay(self._failures, random.random).total_seconds()

    def _record_success(self) -> None:
        if self._failures:
            log.warning("%s: reachable again after %.0f s", self.conn_id, time.monotonic() - self._failing_since)
        self._has_polled, self._failures = True, 0

    def _give_up(self, error: Exception) -> None:
        self.stop()
        self.fail(error)

    def _close(self, hook: DelayHook) -> None:
        with suppress(Exception):
            self.release_resources()
        with suppress(Exception):
            hook.close()


async def pause_after_deferral(trigger: BaseTrigger, *, began: float) -> None:
    """Wait until ``trigger`` may resume its task; it ``began`` at this time of the monotonic clock.

    Airflow notices the exit of the deferring process up to ``[workers] min_heartbeat_interval`` seconds late. If the
    task is resumed earlier, the scheduler takes that exit for the resumed task's and fails it (apache/airflow issues
    67287 and 72716). After a longer wait there is no pause, nor in ``dag.test()``, which has no scheduler and no task
    instance.
    """
    if trigger.task_instance is not None:
        await asyncio.sleep(began + _pause_seconds() - time.monotonic())


def _pause_seconds() -> float:
    from airflow.sdk.configuration import conf

    noticed: float = conf.getfloat("workers", "min_heartbeat_interval", fallback=5)
    return noticed + MARGIN_SECONDS
