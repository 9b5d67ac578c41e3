"""One thread with one broker for everything that waits on one connection in one event loop."""

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
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.hooks.delay import DelayHook

if TYPE_CHECKING:
    #: The kind of thread, its event loop, the connection and who holds its messages.
    Key: TypeAlias = tuple[type["BrokerThread"], asyncio.AbstractEventLoop, str, str | None]

log = logging.getLogger(__name__)


class BrokerThread(ABC):
    """Runs the blocking broker calls of many waiters.

    The thread calls ``look`` again and again and hands what it found to the event loop; waiters live on the loop alone.
    It outlives every outage: the broker is opened anew, so a changed password is picked up as well. It ends when the
    last user has left. Sync calls into Airflow (the connection) are allowed here since this is not the loop's thread.
    """

    #: Seconds between two looks.
    interval: float
    #: Waits between attempts while the broker is away.
    outage = Backoff()

    _running: ClassVar[dict[Key, BrokerThread]] = {}

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        self.conn_id = conn_id
        self.hold = hold
        self.loop = loop
        self.users = 0
        self.thread = threading.Thread(target=self._run, name=f"{type(self).__name__}-{conn_id}", daemon=True)
        self._stop = threading.Event()
        self._look_now = threading.Event()
        self._has_looked = False
        self._failures = 0
        self._failing_since = 0.0

    @classmethod
    @contextmanager
    def shared(cls, conn_id: str, *, hold: str | None = None) -> Iterator[Self]:
        """Share the thread of this connection and hold with all other users on this event loop."""
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
        """Come to an end since the last user has left; runs on the event loop."""
        self.stop()

    def stop(self) -> None:
        """Let the thread end after its current call; runs on the event loop."""
        key = (type(self), self.loop, self.conn_id, self.hold)
        if self._running.get(key) is self:
            del self._running[key]
        self._stop.set()
        self._look_now.set()

    def look_now(self) -> None:
        """Cut the pause between two looks short; an outage's pause stays."""
        self._look_now.set()

    @abstractmethod
    def look(self, hook: DelayHook) -> bool:
        """Make the blocking calls of one round and say whether more can be had at once; runs in the thread."""

    def let_go(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what the broker gave, before it is closed; runs in the thread."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Hand ``error`` to every waiter; runs on the event loop."""

    def call_on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Run ``function`` on the event loop; a loop that is closed has no waiters left."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._stop.set()

    def _run(self) -> None:
        hook = DelayHook(self.conn_id, hold=self.hold)
        while not self._stop.is_set():
            self._look_now.clear()
            try:
                more = self.look(hook)
            except Exception as error:  # noqa: BLE001 - waiters survive whatever a broker's client raises
                self._close(hook)
                if isinstance(error, ConfigurationError) and not self._has_looked:
                    self.call_on_loop(self._give_up, error)
                    break
                self._stop.wait(self._back_off(error))
            else:
                self._note_success()
                if not more:
                    self._look_now.wait(self.interval)
        self._close(hook)

    def _back_off(self, error: Exception) -> float:
        self._failures += 1
        if self._failures == 1:
            self._failing_since = time.monotonic()
            log.warning("%s: cannot look for messages, waiting tasks wait on: %s", self.conn_id, error)
        return self.outage.delay(self._failures, random.random).total_seconds()

    def _note_success(self) -> None:
        if self._failures:
            log.warning("%s: reachable again after %.0f s", self.conn_id, time.monotonic() - self._failing_since)
        self._has_looked, self._failures = True, 0

    def _give_up(self, error: Exception) -> None:
        self.stop()
        self.fail(error)

    def _close(self, hook: DelayHook) -> None:
        with suppress(Exception):
            self.let_go()
        with suppress(Exception):
            hook.close()
