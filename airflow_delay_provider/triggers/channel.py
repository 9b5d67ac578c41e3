"""The shared watch on channels: sensors wait for a message without a thread or connection of their own."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.dotted import load_function
from airflow_delay_provider.exceptions import BrokerError, ConfigurationError, DelayError, InvalidMessageError
from airflow_delay_provider.triggers.broker_thread import BrokerThread

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.shared_consumer import Bound, SharedConsumer
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.hooks.delay import DelayHook

    Filter = Callable[[Message], bool]

log = logging.getLogger(__name__)

#: A message that one waiter was woken for and that is still there wakes another one after this time.
ANNOUNCE_AGAIN_SECONDS = 30.0
#: How often the log says that sensors see the head of a channel only.
SAY_AGAIN_SECONDS = 600.0
#: How long the end of a trigger waits until held messages are back in their channels.
GIVE_BACK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """What a sensor waits for."""

    channel: str
    #: Dotted path of a function that gets a ``Message`` and says whether it is the one.
    filter: str | None = None
    #: How many messages at the head of the channel are looked at.
    look_ahead: int = 100


@dataclass(slots=True)
class _Outage:
    """A channel that cannot be consumed."""

    since: float
    failures: int = 0
    next_look: float = 0.0


class ChannelWatch(BrokerThread):
    """Wakes one waiter for each message that passes its filter.

    The message stays in its channel, kept for the task that is woken: whatever is killed, the broker hands it out
    again. A channel that fails holds up its own waiters only, and so does a filter that raises.
    """

    interval = 0.5

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        super().__init__(conn_id, loop, hold=hold)
        self._waiters: dict[Watch, list[asyncio.Future[str]]] = {}
        #: What the thread reads: replaced as a whole, never changed.
        self._watches: tuple[Watch, ...] = ()
        #: By channel and id, so that one message wakes one waiter, whatever the filters are.
        self._announced: dict[tuple[str, str], float] = {}
        #: Announced, and not yet told to the consumer.
        self._promises: deque[tuple[str, str]] = deque()
        #: How many messages were announced, and up to which one nothing is kept any more for a task that was woken.
        self._promised = self._kept = 0
        self._consumer: SharedConsumer | None = None
        self._outages: dict[str, _Outage] = {}
        #: Channels that could be consumed.
        self._seen: set[str] = set()
        #: Channels whose head is full of messages that no filter wants, and when to say so again.
        self._full: dict[str, float] = {}

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
            self.look_now()

    async def give_back(self) -> None:
        """Return once held messages are back in their channels, if this was the last waiter."""
        if not self.users:
            self.stop()
            await asyncio.to_thread(self.thread.join, GIVE_BACK_SECONDS)

    def leave(self) -> None:
        # A message that a task was told of is kept for it until it comes.
        if self._kept == self._promised:
            self.stop()

    def look(self, hook: DelayHook) -> bool:
        if self._consumer is None:
            self._consumer = hook.get_conn().open_shared_consumer(on_change=self.look_now)
        promised = self._promised
        while self._promises:
            self._consumer.promise(*self._promises.popleft())
        watches = self._watches
        for channel, view in self._consumer.look(self._bounds(watches)).items():
            here = [watch for watch in watches if watch.channel == channel]
            if isinstance(view, DelayError):
                self._note_outage(channel, view)
            else:
                self._note_view(channel, view, here)
                for watch in here:
                    self._announce(watch, view[: watch.look_ahead])
        if promised != self._kept and not self._consumer.has_promises:
            self.call_on_loop(self._note_promises_kept, promised)
        return False

    def let_go(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def fail(self, error: Exception) -> None:
        for watch in self._watches:
            self._fail_watch(watch, error)

    # -- in the thread -------------------------------------------------------------------------------------------

    def _bounds(self, watches: Sequence[Watch]) -> Mapping[str, Bound]:
        """Return what to look at: channels that failed have a pause."""
        from airflow_delay_provider.brokers.shared_consumer import Bound

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

    def _note_outage(self, channel: str, error: DelayError) -> None:
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
            "%s: channel %s cannot be consumed, its sensors wait on; next look in %.0f s: %s",
            self.conn_id,
            channel,
            pause,
            error,
        )

    def _note_view(self, channel: str, view: Sequence[Message], here: Sequence[Watch]) -> None:
        self._seen.add(channel)
        outage = self._outages.pop(channel, None)
        if outage is not None:
            log.warning("%s: channel %s is back after %.0f s", self.conn_id, channel, time.monotonic() - outage.since)
        now = time.monotonic()
        is_full = len(view) >= max((watch.look_ahead for watch in here), default=1)
        if is_full and now >= self._full.get(channel, 0.0) and all(watch.filter is not None for watch in here):
            self._full[channel] = now + SAY_AGAIN_SECONDS
            log.warning(
                "%s: sensors see the first %d messages of channel %s and no others until some of these are taken;"
                " raise look_ahead, or use a channel of its own for what they wait for",
                self.conn_id,
                len(view),
                channel,
            )

    def _announce(self, watch: Watch, messages: Sequence[Message]) -> None:
        try:
            passes = load_filter(watch.filter)
            matching = [message.id for message in messages if passes(message)]
        except Exception as error:  # noqa: BLE001 - a user's filter that fails ends its own waiters only
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
            self.look_now()

    def _note_promises_kept(self, kept: int) -> None:
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
    """Return the function at a dotted path; no path lets every message pass."""
    if path is None:
        return lambda _message: True
    return load_function("filter", path, example="my_company.filters.is_invoice")


def _most_bytes() -> int:
    from airflow.sdk.configuration import conf

    from airflow_delay_provider.brokers.shared_consumer import Bound

    most: int = conf.getint("delay", "sensor_max_bytes", fallback=Bound().bytes)
    return most
