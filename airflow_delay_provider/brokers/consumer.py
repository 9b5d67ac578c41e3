"""The consumer loop that works on any broker: it never sleeps for a message and never loses one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Event

from airflow_delay_provider.brokers.base import DEFAULT_VISIBILITY, Broker
from airflow_delay_provider.domain.message import Delivery, Message
from airflow_delay_provider.exceptions import DeferMessage, LifecycleError

log = logging.getLogger(__name__)

Handler = Callable[[Message], object]

#: Between two looks of an idle consumer at whether it is to stop.
LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerConfig:
    """How a channel is consumed."""

    #: A message that was handled this often goes to the dead-letter channel instead of back.
    max_handled: int = 10
    #: Where given-up messages go; None is the channel's name with ``.dead`` behind it.
    dead_letter_channel: str | None = None
    #: Messages handed out at once.
    prefetch: int = 100
    #: A message not settled in this time is handed out again.
    visibility: timedelta = DEFAULT_VISIBILITY
    #: How long an idle consumer waits before it looks again.
    idle: timedelta = timedelta(milliseconds=200)


@dataclass(kw_only=True, slots=True)
class Consumed:
    """What became of the messages of one run."""

    handled: int = 0
    deferred: int = 0
    dead_lettered: int = 0

    @property
    def total(self) -> int:
        """All messages that were settled."""
        return self.handled + self.deferred + self.dead_lettered


class Consumer:
    """Hands messages of one channel to a handler and settles each by how the handler ended.

    Returns: acknowledged. ``DeferMessage(delay)``: reposted to the message's own channel after the delay, without
    blocking. Any other exception: given up, to the dead-letter channel with the reason, since a failure that was not
    declared transient would fail again. A message is settled only after its handler ended: a crash hands it out again.
    """

    def __init__(self, broker: Broker, channel: str, handler: Handler, *, config: ConsumerConfig | None = None) -> None:
        self.broker = broker
        self.channel = channel
        self.handler = handler
        self.config = config or ConsumerConfig()
        self.dead_letter_channel = self.config.dead_letter_channel or f"{channel}.dead"

    def run_once(self, *, limit: int | None = None) -> Consumed:
        """Handle what can be received now."""
        wanted = self.config.prefetch if limit is None else min(limit, self.config.prefetch)
        deliveries = self.broker.receive(self.channel, limit=wanted, visibility=self.config.visibility)
        consumed = Consumed()
        for position, delivery in enumerate(deliveries):
            try:
                self._handle(delivery, consumed)
            except LifecycleError as lost:
                # Its visibility ended meanwhile: whoever has it now settles it.
                log.warning("A handler took longer than %s: %s", self.config.visibility, lost)
            except BaseException:
                # Ended from outside: others need not wait for the visibility of what was not begun.
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
            self._give_up(delivery, f"handed out {message.handled_count} times without an end", consumed)
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
        log.warning("Message %s goes to %s: %s", delivery.message.id, self.dead_letter_channel, reason)
        self.broker.dead_letter(delivery, channel=self.dead_letter_channel, reason=reason)
        consumed.dead_lettered += 1


def _pause(seconds: float, stop: Event) -> None:
    """Wait without holding the lock of ``stop``: a signal handler of this thread that sets it would wait for ever."""
    end = time.monotonic() + seconds
    while not stop.is_set() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_SECONDS))
