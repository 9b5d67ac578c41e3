"""The shared consumer on RabbitMQ: a queue shows messages only to consumers that take them, so they are held."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.consumer import BATCH, Bound, SharedConsumer, View
from airflow_delay_provider.brokers.rabbitmq import admin, wire
from airflow_delay_provider.brokers.rabbitmq.receive import AmqpMessage, ConsumerChannel
from airflow_delay_provider.brokers.rabbitmq.topology import is_exchange
from airflow_delay_provider.domain.exceptions import BrokerError, DelayError, UnknownChannelError
from airflow_delay_provider.domain.message import Message

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.client import RabbitMQClient
    from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection
    from airflow_delay_provider.domain.clock import Clock

log = logging.getLogger(__name__)

#: Other programs' consumers have 0 as a rule: any of them that is free gets a message before this one.
PRIORITY = -10
#: Where returning a message counts nothing, messages that no waiter wants are given back after this time. It doubles up
#: to the longest while all of them come again, because then no other consumer wants them either.
SHORTEST_HOLD_SECONDS = 1.0
LONGEST_HOLD_SECONDS = 30.0
#: After giving back, nothing is taken for this long, so that other consumers can take it.
PAUSE_SECONDS = 1.0
#: How long a promised message is kept for the task that was notified of it.
PROMISE_SECONDS = 300.0
#: How often a promised message is offered to consumers that exist and do not take it.
MOST_OFFERS = 3
#: Where returning counts as a delivery, messages are returned just before RabbitMQ's consumer timeout (30 minutes).
RENEW_SECONDS = 20 * 60.0
#: ... and not after so many deliveries: RabbitMQ 4's default limit is 20.
MOST_COUNTED = 10
#: Only promised messages are kept.
NOTHING_MORE = Bound(messages=0)


class RabbitMQSharedConsumer(SharedConsumer):
    """One AMQP channel for each queue, over the client's one connection, so that each queue fails by itself."""

    def __init__(self, client: RabbitMQClient, clock: Clock, *, on_change: Callable[[], None]) -> None:
        self._client = client
        self._clock = clock
        self._on_change = on_change
        self._connection: AmqpConnection | None = None
        self._queues: dict[str, HeldQueue] = {}

    def look(self, bounds: Mapping[str, Bound]) -> Mapping[str, View]:
        connection = self._client.connection()
        if connection is not self._connection:
            # The broker has redelivered everything that the earlier connection held.
            self._connection, self._queues = connection, {}
        views = dict[str, View]()
        promised = {name: NOTHING_MORE for name, queue in self._queues.items() if queue.has_promises}
        for name in set(self._queues) - set(bounds) - set(promised):
            self._queues.pop(name).close()
        for name, bound in {**promised, **bounds}.items():
            try:
                views[name] = self._queue(connection, name).look(bound)
            except DelayError as error:
                if not connection.is_open:
                    raise
                if name in self._queues:
                    self._queues.pop(name).close()
                views[name] = error
        return {name: view for name, view in views.items() if name in bounds}

    def promise(self, channel: str, message_id: str) -> None:
        if channel in self._queues:
            self._queues[channel].promise(message_id)

    @property
    def has_promises(self) -> bool:
        return any(queue.has_promises for queue in self._queues.values())

    def close(self) -> None:
        while self._queues:
            self._queues.popitem()[1].close()

    def _queue(self, connection: AmqpConnection, name: str) -> HeldQueue:
        queue = self._queues.get(name)
        if queue is not None and not queue.is_open:
            # The broker may have ended the consumer only; closing the channel returns the messages.
            self._queues.pop(name).close()
            queue = None
        if queue is None:
            if is_exchange(name):
                raise UnknownChannelError("channel", f"{name!r} is an exchange", "name a queue bound to it")
            queue = self._queues[name] = HeldQueue(connection, name, self._clock, on_change=self._on_change)
        return queue


@dataclass(slots=True)
class Promise:
    """A message that a task was notified of."""

    until: float
    offers: int = 0


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """A message that this consumer holds."""

    message: Message
    #: Identifies it when it comes again.
    mark: str | int
    #: Deliveries that the queue has counted.
    counted: int
    since: float


class HeldQueue:
    """Holds messages at the head of one queue within a bound.

    Messages are never acknowledged here: however this process ends, the broker redelivers them. Returned messages go to
    where they were, so the order stays. At most one delivery is counted for each of: a lost connection, a killed
    process; and where ``basic_nack`` counts (before RabbitMQ 4.3), the end of the last wait, a hand-over, and each
    ``RENEW_SECONDS`` of waiting.
    """

    def __init__(self, connection: AmqpConnection, queue: str, clock: Clock, *, on_change: Callable[[], None]) -> None:
        # Refuses a queue that does not exist with a better message than a consumer would.
        admin.message_count(connection, queue)
        self._connection = connection
        self._queue = queue
        self._clock = clock
        self._consumer = ConsumerChannel(connection, queue, on_change=on_change)
        self._consumer_tags: list[str] = []
        #: How many messages the running consumers may push, and the last delivery tag of earlier ones.
        self._prefetch = self._earlier = 0
        self._held: dict[int, HeldMessage] = {}
        self._promises: dict[str, Promise] = {}
        #: Other consumers at the last look while a message was promised, and the fewest since the first promise.
        self._others = self._bystanders = 0
        #: Whether a task is expected to come for a promised message.
        self._is_awaited = False
        self._held_since = 0.0
        self._hold_seconds = SHORTEST_HOLD_SECONDS
        self._pause_until = 0.0
        self._given_back: set[str | int] = set()

    @property
    def is_open(self) -> bool:
        """Whether messages can come, as far as known."""
        return self._consumer.is_open

    @property
    def has_promises(self) -> bool:
        """Whether a promised message is held."""
        return self.is_open and any(True for _ in self._promised())

    def look(self, bound: Bound) -> list[Message]:
        """Return the held messages, after returning and requesting those for which it is time."""
        now = time.monotonic()
        self._take_in(now)
        self._hand_over(now)
        if self._connection.counts_returns:
            self._renew(now)
        else:
            self._return_unwanted(now)
        if now >= self._pause_until:
            self._request_more(bound)
        return [held.message for held in self._held.values()]

    def promise(self, message_id: str) -> None:
        """Keep a message until its task comes for it; no consumer that exists now is that task."""
        self._promises[message_id] = Promise(time.monotonic() + PROMISE_SECONDS)
        # The next look reports what is wrong with this queue.
        with suppress(DelayError):
            self._count_bystanders()

    def close(self) -> None:
        """Return all messages, which counts fewer deliveries than closing the channel alone."""
        if self.is_open:
            try:
                self._stop()
                self._take_in(time.monotonic())
                self._give_back(list(self._held))
            except BrokerError as error:
                log.warning("%s: closed without returning %d messages: %s", self._queue, len(self._held), error)
        self._consumer.close()

    # -- taking --------------------------------------------------------------------------------------------------

    def _take_in(self, now: float) -> None:
        for item in self._consumer.take(sys.maxsize):
            if not self._held:
                self._held_since = now
            held = self._held[item.tag] = self._read(item, now)
            if (promise := self._promises.get(held.message.id)) is not None:
                promise.offers += 1

    def _read(self, item: AmqpMessage, now: float) -> HeldMessage:
        message = wire.decode_message(item.properties, item.body, queue=self._queue, now=self._clock.now()).message
        counted = (item.properties.headers or {}).get("x-delivery-count", 0)
        return HeldMessage(message, item.properties.message_id or hash(item.body), int(counted), now)

    def _request_more(self, bound: Bound) -> None:
        """Let the broker push more, in batches, until one of the bounds is reached."""
        size = sum(len(held.message.payload) for held in self._held.values())
        if size >= bound.bytes or self._capacity > bound.messages:
            self._stop()
        more = min(BATCH, bound.messages - self._capacity)
        if size < bound.bytes and len(self._held) >= self._capacity and more > 0:
            self._consumer_tags.append(self._consumer.begin(prefetch=more, **{"x-priority": PRIORITY}))
            self._prefetch += more

    @property
    def _capacity(self) -> int:
        """How many messages can be held at most."""
        return self._prefetch + sum(tag <= self._earlier for tag in self._held)

    def _stop(self) -> None:
        while self._consumer_tags:
            self._consumer.end(self._consumer_tags.pop())
        self._prefetch, self._earlier = 0, max(self._held, default=0)

    # -- giving back ---------------------------------------------------------------------------------------------

    def _hand_over(self, now: float) -> None:
        """Return promised messages, the oldest first, when their tasks have come.

        A task that was notified of a message begins to consume; then the message goes back to the head of the queue,
        and that task gets it before this consumer. Consumers that existed before are not that task: another triggerer
        would hold the message. A consumer that has come and takes nothing is offered the message a few times only.
        """
        self._promises = {each: promise for each, promise in self._promises.items() if promise.until > now}
        promised = list(self._promised())
        if not promised:
            self._is_awaited = False
            return
        self._count_bystanders()
        others = self._count_others()
        self._bystanders = min(self._bystanders, others)
        has_come = others > self._others
        offered = [tag for tag, promise in promised if has_come or promise.offers < MOST_OFFERS]
        self._others = others
        self._give_back(offered[: others - self._bystanders])

    def _count_bystanders(self) -> None:
        """Count the consumers that exist before any task was notified."""
        if not self._is_awaited:
            self._others = self._bystanders = self._count_others()
            self._is_awaited = True

    def _count_others(self) -> int:
        return admin.consumer_count(self._connection, self._queue) - len(self._consumer_tags)

    def _promised(self) -> Iterable[tuple[int, Promise]]:
        for tag, held in self._held.items():
            if (promise := self._promises.get(held.message.id)) is not None:
                yield tag, promise

    def _unwanted(self) -> list[int]:
        return [tag for tag, held in self._held.items() if held.message.id not in self._promises]

    def _return_unwanted(self, now: float) -> None:
        """Return messages that no waiter has wanted for a while, and take nothing for a moment."""
        if not self._unwanted() or now - self._held_since < self._hold_seconds:
            return
        self._stop()
        self._take_in(now)
        marks = {held.mark for held in self._held.values()}
        is_unchanged = self._given_back <= marks
        self._hold_seconds = (
            min(2 * self._hold_seconds, LONGEST_HOLD_SECONDS) if is_unchanged else SHORTEST_HOLD_SECONDS
        )
        self._give_back(self._unwanted())
        self._given_back = marks
        self._held_since, self._pause_until = now, now + PAUSE_SECONDS

    def _renew(self, now: float) -> None:
        """Hold as long as RabbitMQ allows, because each return counts; raise before a message is lost by it."""
        is_due = bool(self._held) and now - self._held_since >= RENEW_SECONDS
        for tag in self._unwanted():
            held = self._held[tag]
            # A waiter that wants a message claims it within a moment.
            if held.counted >= MOST_COUNTED and (is_due or now - held.since >= SHORTEST_HOLD_SECONDS):
                raise BrokerError(
                    f"{self._connection.config.name}: message {held.message.id} of {self._queue} was delivered"
                    f" {held.counted} times and passes no sensor's filter; {self._connection.server} counts each return"
                    " and a queue with a delivery limit would drop it: use RabbitMQ 4.3 or later, a separate queue for"
                    " the messages that sensors wait for, or a filter that takes this message",
                    may_pass=False,
                )
        if is_due:
            self._give_back(list(self._held))
            self._held_since = now

    def _give_back(self, tags: Collection[int]) -> None:
        self._consumer.give_back(tags)
        for tag in tags:
            del self._held[tag]
