"""The messages of one queue that a shared consumer holds, and when it gives them back."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.rabbitmq import declaring, wire
from airflow_delay_provider.brokers.rabbitmq.consuming import Consumption, Pushed
from airflow_delay_provider.brokers.shared_consumer import BATCH, Bound
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.exceptions import BrokerError, DelayError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.session import Session
    from airflow_delay_provider.domain.clock import Clock

log = logging.getLogger(__name__)

#: Consumers of other programs have 0 as a rule: whoever of them is free gets a message before we do.
PRIORITY = -10
#: Messages that no waiter wants are given back after this time, where that counts nothing. The time doubles up to the
#: longest while all of them come again, since then nobody else wants them either.
SHORTEST_HOLD_SECONDS = 1.0
LONGEST_HOLD_SECONDS = 30.0
#: After giving back we take nothing for this long, so that others can.
PAUSE_SECONDS = 1.0
#: A promised message is kept this long for the task that was told of it.
PROMISE_SECONDS = 300.0
#: How often a promised message is offered to consumers that are there and do not take it.
MOST_OFFERS = 3
#: Where giving back counts as a delivery, it is done before RabbitMQ's consumer timeout (30 minutes) ends the channel.
RENEW_SECONDS = 20 * 60.0
#: ... and no more when a message was delivered so often: RabbitMQ 4's default limit is 20.
MOST_COUNTED = 10


@dataclass(slots=True)
class Promise:
    """A message that a task was told of."""

    until: float
    offers: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """A message in our hands."""

    message: Message
    #: What tells it from others when it comes again.
    mark: str | int
    #: Deliveries that the queue has counted.
    counted: int
    since: float


class HeldQueue:
    """Holds messages at the head of one queue within a bound.

    Each message is in the queue or in our hands, never acknowledged here: whatever ends us, the broker hands it out
    again. What is given back goes to where it was, so the order stays. Deliveries are counted at most once for each
    of: a lost connection, a killed process; and where ``basic_nack`` counts (before RabbitMQ 4.3), the end of the last
    wait, a hand-over, and each ``RENEW_SECONDS`` of waiting.
    """

    def __init__(self, session: Session, queue: str, clock: Clock, *, on_change: Callable[[], None]) -> None:
        # Refuses a queue that does not exist in better words than a consumer would.
        declaring.message_count(session, queue)
        self._session = session
        self._queue = queue
        self._clock = clock
        self._consumption = Consumption(session, queue, on_change=on_change)
        self._consumers: list[str] = []
        #: How many messages the consumers that run may push, and up to which tag messages are of earlier ones.
        self._prefetch = self._earlier = 0
        self._held: dict[int, Held] = {}
        self._promises: dict[str, Promise] = {}
        #: Consumers of others at the last look while a message was promised, and the fewest since the first promise.
        self._others = self._bystanders = 0
        #: Whether a task is on its way.
        self._is_awaited = False
        self._held_since = 0.0
        self._hold_seconds = SHORTEST_HOLD_SECONDS
        self._pause_until = 0.0
        self._given_back: set[str | int] = set()

    @property
    def is_open(self) -> bool:
        """Whether messages can come, as far as known."""
        return self._consumption.is_open

    @property
    def has_promises(self) -> bool:
        """Whether a promised message is in our hands."""
        return self.is_open and any(True for _ in self._promised())

    def look(self, bound: Bound) -> list[Message]:
        """Return what is in our hands, after giving back and asking for what is due to be."""
        now = time.monotonic()
        self._take_in(now)
        self._hand_over(now)
        if self._session.counts_returns:
            self._renew(now)
        else:
            self._let_others_have(now)
        if now >= self._pause_until:
            self._ask(bound)
        return [held.message for held in self._held.values()]

    def promise(self, message_id: str) -> None:
        """Keep a message until its task comes for it; no consumer that is there now is that task."""
        self._promises[message_id] = Promise(time.monotonic() + PROMISE_SECONDS)
        # The next look says what is wrong with this queue, and with no other.
        with suppress(DelayError):
            self._count_bystanders()

    def close(self) -> None:
        """Give everything back, which counts less than leaving that to the end of the channel."""
        if self.is_open:
            try:
                self._stop()
                self._take_in(time.monotonic())
                self._give_back(list(self._held))
            except BrokerError as error:
                log.warning("%s: %s was left without giving back %d messages", self._queue, error, len(self._held))
        self._consumption.close()

    # -- taking --------------------------------------------------------------------------------------------------

    def _take_in(self, now: float) -> None:
        for item in self._consumption.take(sys.maxsize):
            if not self._held:
                self._held_since = now
            held = self._held[item.tag] = self._read(item, now)
            if (promise := self._promises.get(held.message.id)) is not None:
                promise.offers += 1

    def _read(self, item: Pushed, now: float) -> Held:
        message = wire.read_message(item.properties, item.body, queue=self._queue, now=self._clock.now()).message
        counted = (item.properties.headers or {}).get("x-delivery-count", 0)
        return Held(message, item.properties.message_id or hash(item.body), int(counted), now)

    def _ask(self, bound: Bound) -> None:
        """Let the broker push more, in batches, until the bound is reached in one way or the other."""
        size = sum(len(held.message.payload) for held in self._held.values())
        if size >= bound.bytes or self._capacity > bound.messages:
            self._stop()
        more = min(BATCH, bound.messages - self._capacity)
        if size < bound.bytes and len(self._held) >= self._capacity and more > 0:
            self._consumers.append(self._consumption.begin(prefetch=more, **{"x-priority": PRIORITY}))
            self._prefetch += more

    @property
    def _capacity(self) -> int:
        """How many messages can be in our hands at most."""
        return self._prefetch + sum(tag <= self._earlier for tag in self._held)

    def _stop(self) -> None:
        while self._consumers:
            self._consumption.end(self._consumers.pop())
        self._prefetch, self._earlier = 0, max(self._held, default=0)

    # -- giving back ---------------------------------------------------------------------------------------------

    def _hand_over(self, now: float) -> None:
        """Give promised messages to consumers that have come, the oldest first.

        A task that was told of a message begins to consume; then the message goes back to the head of the queue, and
        that task gets it before we do. Consumers that were there before are no such task: another triggerer would hold
        the message. A consumer that has come and takes nothing is offered it a few times only.
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
        """Count the consumers that are there while no task is on its way yet."""
        if not self._is_awaited:
            self._others = self._bystanders = self._count_others()
            self._is_awaited = True

    def _count_others(self) -> int:
        return declaring.consumer_count(self._session, self._queue) - len(self._consumers)

    def _promised(self) -> Iterable[tuple[int, Promise]]:
        for tag, held in self._held.items():
            if (promise := self._promises.get(held.message.id)) is not None:
                yield tag, promise

    def _unwanted(self) -> list[int]:
        return [tag for tag, held in self._held.items() if held.message.id not in self._promises]

    def _let_others_have(self, now: float) -> None:
        """Give back what no waiter has wanted for a while, and take nothing for a moment."""
        if not self._unwanted() or now - self._held_since < self._hold_seconds:
            return
        self._stop()
        self._take_in(now)
        marks = {held.mark for held in self._held.values()}
        nobody_took_any = self._given_back <= marks
        self._hold_seconds = (
            min(2 * self._hold_seconds, LONGEST_HOLD_SECONDS) if nobody_took_any else SHORTEST_HOLD_SECONDS
        )
        self._give_back(self._unwanted())
        self._given_back = marks
        self._held_since, self._pause_until = now, now + PAUSE_SECONDS

    def _renew(self, now: float) -> None:
        """Hold for as long as RabbitMQ allows, since each return counts; refuse before a message is lost by it."""
        is_due = bool(self._held) and now - self._held_since >= RENEW_SECONDS
        for tag in self._unwanted():
            held = self._held[tag]
            # Whoever wants a message says so within a moment.
            if held.counted >= MOST_COUNTED and (is_due or now - held.since >= SHORTEST_HOLD_SECONDS):
                raise BrokerError(
                    f"{self._session.config.name}: message {held.message.id} of {self._queue} was delivered"
                    f" {held.counted} times and passes no sensor's filter; {self._session.server} counts each return"
                    " and a queue with a delivery limit would drop it: use RabbitMQ 4.3 or later, a queue of its own"
                    " for what sensors wait for, or a filter that takes it",
                    may_pass=False,
                )
        if is_due:
            self._give_back(list(self._held))
            self._held_since = now

    def _give_back(self, tags: Collection[int]) -> None:
        self._consumption.give_back(tags)
        for tag in tags:
            del self._held[tag]
