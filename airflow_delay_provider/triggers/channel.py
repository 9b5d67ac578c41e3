"""The shared watch on channels: sensors wait for a message without a thread or connection of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.dotted import load_function
from airflow_delay_provider.triggers.broker_thread import BrokerThread

if TYPE_CHECKING:
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.hooks.delay import DelayHook

    Filter = Callable[[Message], bool]

#: A message that one waiter was woken for and that is still there wakes another one after this time.
ANNOUNCE_AGAIN_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """What a sensor waits for."""

    channel: str
    #: Dotted path of a function that gets a ``Message`` and says whether it is the one.
    filter: str | None = None
    #: How many messages at the head of the channel are looked at.
    look_ahead: int = 100


class ChannelWatch(BrokerThread):
    """Wakes one waiter for each message that passes its filter; messages stay where they are."""

    interval = 0.5

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        super().__init__(conn_id, loop, hold=hold)
        self._waiters: dict[Watch, list[asyncio.Future[str]]] = {}
        #: What the thread reads: replaced as a whole, never changed.
        self._watches: tuple[Watch, ...] = ()
        self._announced: dict[tuple[Watch, str], float] = {}

    async def message_id(self, watch: Watch) -> str:
        """Wait until a message can be received and return its id; somebody else may still take it."""
        found: asyncio.Future[str] = self.loop.create_future()
        self._waiters.setdefault(watch, []).append(found)
        self._watches = tuple(self._waiters)
        self.look_now()
        try:
            return await found
        finally:
            self._waiters[watch].remove(found)
            if not self._waiters[watch]:
                del self._waiters[watch]
                self._watches = tuple(self._waiters)

    def look(self, hook: DelayHook) -> bool:
        broker = hook.get_conn()
        watches = self._watches
        for channel in {watch.channel for watch in watches}:
            here = [watch for watch in watches if watch.channel == channel]
            messages = broker.peek(channel, limit=max(watch.look_ahead for watch in here))
            for watch in here:
                self._announce(watch, messages[: watch.look_ahead])
        return False

    def fail(self, error: Exception) -> None:
        for watch in self._watches:
            self._fail_watch(watch, error)

    def _announce(self, watch: Watch, messages: list[Message]) -> None:
        try:
            passes = load_filter(watch.filter)
            matching = [message.id for message in messages if passes(message)]
        except Exception as error:  # noqa: BLE001 - a user's filter that fails ends its own waiters only
            self.call_on_loop(self._fail_watch, watch, error)
        else:
            self.call_on_loop(self._wake, watch, matching)

    def _wake(self, watch: Watch, message_ids: list[str]) -> None:
        now = time.monotonic()
        self._announced = {key: at for key, at in self._announced.items() if now - at < ANNOUNCE_AGAIN_SECONDS}
        waiting = [found for found in self._waiters.get(watch, ()) if not found.done()]
        fresh = [each for each in message_ids if (watch, each) not in self._announced]
        for found, message_id in zip(waiting, fresh, strict=False):
            self._announced[watch, message_id] = now
            found.set_result(message_id)

    def _fail_watch(self, watch: Watch, error: Exception) -> None:
        for found in self._waiters.get(watch, ()):
            if not found.done():
                found.set_exception(error)


def load_filter(path: str | None) -> Filter:
    """Return the function at a dotted path; no path lets every message pass."""
    if path is None:
        return lambda _message: True
    return load_function("filter", path, example="my_company.filters.is_invoice")
