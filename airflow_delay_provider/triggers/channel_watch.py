"""Watches channels for all sensors of a triggerer, with one thread and one consumer."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.arguments import load_function
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, DelayError, InvalidMessageError
from airflow_delay_provider.triggers.broker_thread import BrokerThread

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.consumer import Bound, SharedConsumer
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.hooks.delay import DelayHook

    Filter = Callable[[Message], bool]

log = logging.getLogger(__name__)

#: If a message is still in its channel this long after it woke a sensor, it wakes another one.
ANNOUNCE_AGAIN_SECONDS = 30.0
#: How often the log repeats that sensors see only the head of a channel.
WARN_AGAIN_SECONDS = 600.0
#: How long a stopping trigger waits until held messages are back in their channels.
RELEASE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """What a sensor waits for."""

    channel: str
    #: Dotted path of a function that gets a ``Message`` and returns whether to take it.
    filter: str | None = None
    #: Number of messages at the head of the channel that the filter sees.
    look_ahead: int = 100


@dataclass(slots=True)
class _Outage:
    """A channel that cannot be consumed."""

    since: float
    failures: int = 0
    next_look: float = 0.0


class ChannelWatch(BrokerThread):
    """Wakes one sensor for each message that passes its filter.

    The message stays in its channel, reserved for the task that was woken. If a process is killed, the broker delivers
    it again. A channel that fails affects only its own sensors, and so does a filter that raises.
    """

    interval = 0.5

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        super().__init__(conn_id, loop, hold=hold)
        self._waiters: dict[Watch, list[asyncio.Future[str]]] = {}
        #: Read by the thread, so it is replaced as a whole and never changed.
        self._watches: tuple[Watch, ...] = ()
        #: By channel and id, so that one message wakes one sensor even if it passes several filters.
        self._announced: dict[tuple[str, str], float] = {}
        #: Announced to a sensor, but not yet reserved at the consumer.
        self._promises: deque[tuple[str, str]] = deque()
        #: Number of announced messages, and how many of these the consumer no longer reserves for a task.
        self._promised = self._kept = 0
        self._consumer: SharedConsumer | None = None
        self._outages: dict[str, _Outage] = {}
        #: Channels that could be consumed.
        self._seen: set[str] = set()
        #: Channels whose head is full of messages that pass no filter, and when to warn again.
        self._full: dict[str, float] = {}

    async def message_id(self, watch: Watch) -> str:
        """Wait for a message and return its id; another consumer may still take it."""
        found: asyncio.Future[str] = self.loop.create_future()
        self._waiters.setdefault(watch, []).append(found)
        self._watches = tuple(self._waiters)
        self.poll_now()
        try:
            return await found
        finally:
            self._waiters[watch].remove(found)
            if not self._waiters[watch]:
                del self._waiters[watch]
                self._watches = tuple(self._waiters)
            self.poll_now()

    async def release(self) -> None:
        """Wait until held messages are back in their channels, if this was the last sensor."""
        if not self.users:
            self.stop()
            await asyncio.to_thread(self.thread.join, RELEASE_SECONDS)

    def leave(self) -> None:
        # Messages that woke a task stay reserved until the task takes them.
        if self._kept == self._promised:
            self.stop()

    def poll(self, hook: DelayHook) -> bool:
        if self._consumer is None:
            self._consumer = hook.get_conn().open_shared_consumer(on_change=self.poll_now)
        promised = self._promised
        while self._promises:
            self._consumer.promise(*self._promises.popleft())
        watches = self._watches
        for channel, view in self._consumer.look(self._bounds(watches)).items():
            here = [watch for watch in watches if watch.channel == channel]
            if isinstance(view, DelayError):
                self._record_outage(channel, view)
            else:
                self._record_view(channel, view, here)
                for watch in here:
                    self._announce(watch, view[: watch.look_ahead])
        if promised != self._kept and not self._consumer.has_promises:
            self.call_on_loop(self._record_promises_kept, promised)
        return False

    def release_resources(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def fail(self, error: Exception) -> None:
        for watch in self._watches:
            self._fail_watch(watch, error)

    # -- in the thread -------------------------------------------------------------------------------------------

    def _bounds(self, watches: Sequence[Watch]) -> Mapping[str, Bound]:
        """Return how much to read of each channel, without those that pause after an error."""
        from airflow_delay_provider.brokers.consumer import Bound

        channels = {watch.channel for watch in watches}
        self._outages = {channel: outage for channel, outage in self._outages.items() if channel in channels}
        now, most_bytes = time.monotonic(), _most_bytes()
        return {
            channel: Bound(
                messages=max(watch.look_ahead for watch in watches if watch.channel == channel), bytes=most_bytes
            )
            for channel in channels
            if channel not in self._outages or now >= self._outages[channel].next_look
        }

    def _record_outage(self, channel: str, error: DelayError) -> None:
        now = time.monotonic()
        outage = self._outages.setdefault(channel, _Outage(now))
        outage.failures += 1
        pause = self.outage.delay(outage.failures, random.random).total_seconds()
        outage.next_look = now + pause
        is_mistake = isinstance(error, ConfigurationError | InvalidMessageError) and channel not in self._seen
        if is_mistake or (isinstance(error, BrokerError) and not error.may_pass):
            self.call_on_loop(self._fail_channel, channel, error)
            return
        log.warning(
            "%s: cannot consume channel %s; its sensors keep waiting, next attempt in %.0f s: %s",
            self.conn_id,
            channel,
            pause,
            error,
        )

    def _record_view(self, channel: str, view: Sequence[Message], here: Sequence[Watch]) -> None:
        self._seen.add(channel)
        outage = self._outages.pop(channel, None)
        if outage is not None:
            log.warning(
                "%s: channel %s can be consumed again after %.0f s",
                self.conn_id,
                channel,
                time.monotonic() - outage.since,
            )
        now = time.monotonic()
        is_full = len(view) >= max((watch.look_ahead for watch in here), default=1)
        if is_full and now >= self._full.get(channel, 0.0) and all(watch.filter is not None for watch in here):
            self._full[channel] = now + WARN_AGAIN_SECONDS
            log.warning(
                "%s: sensors see only the first %d messages of channel %s, and none of them passes a filter; raise"
                " look_ahead, or send the messages that sensors wait for to a channel of their own",
                self.conn_id,
                len(view),
                channel,
            )

    def _announce(self, watch: Watch, messages: Sequence[Message]) -> None:
        try:
            passes = load_filter(watch.filter)
            matching = [message.id for message in messages if passes(message)]
        except Exception as error:  # noqa: BLE001 - a filter that raises fails only its own sensors
            self.call_on_loop(self._fail_watch, watch, error)
        else:
            if matching:
                self.call_on_loop(self._wake, watch, matching)

    # -- on the event loop ---------------------------------------------------------------------------------------

    def _wake(self, watch: Watch, message_ids: Sequence[str]) -> None:
        now = time.monotonic()
        self._announced = {key: at for key, at in self._announced.items() if now - at < ANNOUNCE_AGAIN_SECONDS}
        waiting = [found for found in self._waiters.get(watch, ()) if not found.done()]
        fresh = [each for each in message_ids if (watch.channel, each) not in self._announced]
        for found, message_id in zip(waiting, fresh, strict=False):
            self._announced[watch.channel, message_id] = now
            self._promises.append((watch.channel, message_id))
            self._promised += 1
            found.set_result(message_id)
            self.poll_now()

    def _record_promises_kept(self, kept: int) -> None:
        self._kept = kept
        if kept == self._promised and not self.users:
            self.stop()

    def _fail_channel(self, channel: str, error: Exception) -> None:
        for watch in list(self._waiters):
            if watch.channel == channel:
                self._fail_watch(watch, error)

    def _fail_watch(self, watch: Watch, error: Exception) -> None:
        for found in self._waiters.get(watch, ()):
            if not found.done():
                found.set_exception(error)


def load_filter(path: str | None) -> Filter:
    """Return the function at a dotted path; without a path, every message passes."""
    if path is None:
        return lambda _message: True
    return load_function("filter", path, example="my_company.filters.is_invoice")


def _most_bytes() -> int:
    from airflow.sdk.configuration import conf

    from airflow_delay_provider.brokers.consumer import Bound

    most: int = conf.getint("delay", "sensor_max_bytes", fallback=Bound().bytes)
    return most
