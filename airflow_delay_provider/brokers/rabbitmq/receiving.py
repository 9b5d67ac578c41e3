"""Messages handed out of queues and settled by those who got them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pika import spec

from airflow_delay_provider.brokers.rabbitmq import declaring, wire
from airflow_delay_provider.brokers.rabbitmq.consuming import Consumption, Pushed
from airflow_delay_provider.brokers.rabbitmq.session import answer
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Delivery, GivenUp, Message
from airflow_delay_provider.exceptions import BrokerError, LifecycleError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.session import AmqpChannel, Session

#: How long the broker may take to push what it says is there, unless another consumer was faster; then for each more.
FIRST_SECONDS = 1.0
NEXT_SECONDS = 0.1
#: How long messages that were looked at may take to be back, unless another consumer has them.
BACK_SECONDS = 1.0


class Receiver:
    """Hands out messages over one session; what is not settled when that ends is handed out again."""

    def __init__(self, session: Session) -> None:
        self.session = session
        #: Handles of another session are not ours to settle: the broker has handed those messages out again.
        self._name = secrets.token_hex(4)
        self._consumptions: dict[str, Consumption] = {}
        #: Handle to the consumption, the delivery tag, and whether it is a dead letter.
        self._held: dict[str, tuple[Consumption, int, bool]] = {}

    def receive(self, queue: str, limit: int, now: datetime, *, wait: float = 0.0) -> list[Delivery]:
        """Hand out what is there and no more: a consumer is begun for just these messages.

        While it waits, a shared consumer sees that somebody has come for what it holds, and hands it over.
        """
        ready = min(limit, declaring.message_count(self.session, queue))
        if not ready and not wait:
            return []
        consumption = self._consumption_of(queue)
        consumer_tag = consumption.begin(prefetch=limit)
        pushed, wait = list[Pushed](), max(wait, FIRST_SECONDS)
        while len(pushed) < max(1, ready) and (more := consumption.take(limit, wait=wait)):
            pushed += more
            wait = NEXT_SECONDS
        consumption.end(consumer_tag)
        pushed += consumption.take(limit)
        return [self._hold(consumption, item, now) for item in pushed]

    def peek(self, queue: str, limit: int, now: datetime) -> list[Message]:
        """Return what the queue would hand out, which goes back at once and is not counted as a delivery."""
        ready = min(limit, declaring.message_count(self.session, queue))
        if ready:
            self._refuse_counted_look()
        pushed = self._look(queue, ready) if ready else []
        return [wire.read_message(item.properties, item.body, queue=queue, now=now).message for item in pushed]

    def ack(self, delivery: Delivery) -> None:
        """Remove a message from its queue."""
        consumption, tag, _ = self._settle(delivery)
        consumption.ack(tag)

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Put messages back to where they were."""
        tags: dict[Consumption, list[int]] = {}
        for delivery in deliveries:
            consumption, tag, _ = self._settle(delivery)
            tags.setdefault(consumption, []).append(tag)
        for consumption, returned in tags.items():
            consumption.give_back(returned)

    def is_dead_letter(self, delivery: Delivery) -> bool:
        """Whether the message was given up before."""
        return self.require_held(delivery)[2]

    def require_held(self, delivery: Delivery) -> tuple[Consumption, int, bool]:
        """Return what is known of a message in hand, or refuse one that is not."""
        held = self._held.get(delivery.handle)
        if held is None or not held[0].is_open:
            raise LifecycleError(
                delivery.message.id,
                "is no longer in hand: it was settled, or the connection was lost; the broker hands it out again",
            )
        return held

    def _refuse_counted_look(self) -> None:
        if self.session.counts_returns:
            raise BrokerError(
                f"{self.session.config.name}: {self.session.server} counts a look at a message as a delivery, and a"
                " queue with a delivery limit drops what was delivered too often; receive messages instead, or use"
                " RabbitMQ 4.3 or later",
                may_pass=False,
            )

    def _settle(self, delivery: Delivery) -> tuple[Consumption, int, bool]:
        held = self.require_held(delivery)
        del self._held[delivery.handle]
        return held

    def _hold(self, consumption: Consumption, item: Pushed, now: datetime) -> Delivery:
        wired = wire.read_message(item.properties, item.body, queue=consumption.queue, now=now)
        handle = f"{self._name}.{consumption.channel.raw.channel_number}.{item.tag}"
        is_dead = wired.change is Change.DEAD_LETTERED
        self._held[handle] = (consumption, item.tag, is_dead)
        end = GivenUp(reason=wired.reason, at=wired.scheduled_at) if is_dead else None
        return Delivery(message=wired.message, handle=handle, given_up=end)

    def _consumption_of(self, queue: str) -> Consumption:
        known = self._consumptions.get(queue)
        if known is None or not known.is_open:
            known = self._consumptions[queue] = Consumption(self.session, queue)
        return known

    def _look(self, queue: str, n: int) -> list[Pushed]:
        """Get messages on a channel of their own and give them back in their order before it is closed.

        A closed channel would count a delivery. A quorum queue has them back a moment later; until then they could not
        be received.
        """
        with declaring.calls(self.session) as channel:
            looked_at = [item for _ in range(n) if (item := get(channel, queue)) is not None]
            if looked_at:
                channel.tell("basic_nack", delivery_tag=looked_at[-1].tag, multiple=True, requeue=True)
        deadline = time.monotonic() + BACK_SECONDS
        while declaring.message_count(self.session, queue) < len(looked_at) and time.monotonic() < deadline:
            time.sleep(0.005)
        return looked_at


def get(channel: AmqpChannel, queue: str) -> Pushed | None:
    """Return the first message of a queue, unsettled, or None if it has none."""

    def begin(future: Future[Pushed | None]) -> None:
        def on_message(_channel: Any, method: spec.Basic.GetOk, properties: spec.BasicProperties, body: bytes) -> None:
            answer(future, Pushed(method.delivery_tag, method.exchange, properties, body))

        # An empty queue answers to all that were asked before, too.
        channel.raw.add_callback(lambda _frame: answer(future, None), [spec.Basic.GetEmpty], one_shot=True)
        channel.raw.basic_get(queue, on_message)

    return channel.wait_for(begin)
