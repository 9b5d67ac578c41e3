"""The consumer loop for any broker, and the consumer that sensors share."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import TypeAlias

from airflow_delay_provider.brokers.port import DEFAULT_VISIBILITY, Broker
from airflow_delay_provider.domain.exceptions import DeferMessage, DelayError, LifecycleError
from airflow_delay_provider.domain.message import Delivery, Message

log = logging.getLogger(__name__)

Handler = Callable[[Message], object]

#: Between two checks of an idle consumer whether to stop.
LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerConfig:
    """How a channel is consumed."""

    #: A message that was handled this often goes to the dead-letter channel.
    max_handled: int = 10
    #: The dead-letter channel; None is the channel's name followed by ``.dead``.
    dead_letter_channel: str | None = None
    #: Messages received at once.
    prefetch: int = 100
    #: A message that is not settled in this time is delivered again.
    visibility: timedelta = DEFAULT_VISIBILITY
    #: How long an idle consumer pauses.
    idle: timedelta = timedelta(milliseconds=200)


@dataclass(kw_only=True, slots=True)
class Consumed:
    """How many messages of one run had which result."""

    handled: int = 0
    deferred: int = 0
    dead_lettered: int = 0

    @property
    def total(self) -> int:
        """All messages that were settled."""
        return self.handled + self.deferred + self.dead_lettered


class Consumer:
    """Calls a handler with each message of a channel, and settles the message by how the handler ends.

    If it returns, the message is acknowledged. ``DeferMessage(delay)`` delivers it again after the delay, without
    blocking. Any other exception moves it to the dead-letter channel with the reason. A message is settled only after
    its handler ended: after a crash it is delivered again.
    """

    def __init__(self, broker: Broker, channel: str, handler: Handler, *, config: ConsumerConfig | None = None) -> None:
        self.broker = broker
        self.channel = channel
        self.handler = handler
        self.config = config or ConsumerConfig()
        self.dead_letter_channel = self.config.dead_letter_channel or f"{channel}.dead"

    def run_once(self, *, limit: int | None = None) -> Consumed:
        """Handle the messages that can be received now."""
        wanted = self.config.prefetch if limit is None else min(limit, self.config.prefetch)
        deliveries = self.broker.receive(self.channel, limit=wanted, visibility=self.config.visibility)
        consumed = Consumed()
        for position, delivery in enumerate(deliveries):
            try:
                self._handle(delivery, consumed)
            except LifecycleError as lost:
                # Its visibility has ended, so another consumer settles it.
                log.warning("A handler took longer than the visibility of %s: %s", self.config.visibility, lost)
            except BaseException:
                # Release the rest, so that others need not wait until its visibility ends.
                self.broker.release(deliveries[position + 1 :])
                raise
        return consumed

    def run(self, *, limit: int | None = None, timeout: timedelta | None = None, stop: Event | None = None) -> Consumed:
        """Handle messages until ``limit`` are settled, ``timeout`` has passed, or ``stop`` is set."""
        stop = stop or Event()
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        consumed = Consumed()
        while not stop.is_set() and (limit is None or consumed.total < limit):
            once = self.run_once(limit=None if limit is None else limit - consumed.total)
            consumed.handled += once.handled
            consumed.deferred += once.deferred
            consumed.dead_lettered += once.dead_lettered
            if deadline is not None and time.monotonic() >= deadline:
                break
            if not once.total:
                _pause(self.config.idle.total_seconds(), stop)
        return consumed

    def _handle(self, delivery: Delivery, consumed: Consumed) -> None:
        message = delivery.message
        if message.handled_count > self.config.max_handled:
            self._give_up(delivery, f"delivered {message.handled_count} times without a result", consumed)
            return
        try:
            self.handler(message)
        except DeferMessage as request:
            if message.handled_count >= self.config.max_handled:
                self._give_up(delivery, f"deferred {message.handled_count} times: {request}", consumed)
            else:
                self.broker.requeue(delivery, timedelta(seconds=request.delay), reason=str(request))
                consumed.deferred += 1
        except Exception as error:
            log.exception("The handler failed on message %s of channel %s", message.id, self.channel)
            self._give_up(delivery, f"{type(error).__name__}: {error}", consumed)
        else:
            self.broker.ack([delivery])
            consumed.handled += 1

    def _give_up(self, delivery: Delivery, reason: str, consumed: Consumed) -> None:
        log.warning("Moving message %s to %s: %s", delivery.message.id, self.dead_letter_channel, reason)
        self.broker.dead_letter(delivery, channel=self.dead_letter_channel, reason=reason)
        consumed.dead_lettered += 1


def _pause(seconds: float, stop: Event) -> None:
    """Wait without holding the lock of ``stop``: a signal handler in this thread that sets it would block forever."""
    end = time.monotonic() + seconds
    while not stop.is_set() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_SECONDS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How much of one channel a shared consumer reads at most."""

    messages: int = 100
    #: Payloads together; the last batch may exceed it.
    bytes: int = 16 * 2**20


#: Messages are fetched in batches of this size, so that large ones are noticed early.
BATCH = 10

#: The first messages of a channel, in order, or why it cannot be consumed.
View: TypeAlias = Sequence[Message] | DelayError


class SharedConsumer(ABC):
    """Sees the messages of many channels and removes none. One thread uses it, for any number of sensors.

    Some brokers show a message only by delivering it. It is then held until its channel is no longer requested, and
    released without counting a delivery, if the broker supports that.
    """

    @abstractmethod
    def look(self, bounds: Mapping[str, Bound]) -> Mapping[str, View]:
        """Return the messages of each of these channels, without waiting; release all other channels.

        The view of a channel that fails is its error. An error of all channels is raised; the consumer can be used
        again.
        """

    def promise(self, channel: str, message_id: str) -> None:  # noqa: B027 - most brokers hold nothing
        """Keep a message for a task that is about to receive it."""

    @property
    def has_promises(self) -> bool:
        """Whether a promised message is still held, so that the consumer must stay open."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release everything."""
