"""Receiving and settling messages of a queue or stream."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pika import BasicProperties, spec
from pika.exceptions import AMQPError

from airflow_delay_provider.brokers.rabbitmq import admin, wire
from airflow_delay_provider.brokers.rabbitmq.connection import AmqpChannel, AmqpConnection, resolve
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.domain.exceptions import BrokerError, LifecycleError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Delivery, GivenUp, Message

if TYPE_CHECKING:
    from pika.channel import Channel

#: How long the broker may take to push a message that it has, unless another consumer was faster; then for each more.
FIRST_SECONDS = 1.0
NEXT_SECONDS = 0.1
#: How long returned messages may take to be back in their queue, unless another consumer has them.
BACK_SECONDS = 1.0
#: RabbitMQ 3.10 mixes up the order when one command returns more messages.
MOST_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class AmqpMessage:
    """One message as the broker delivered it."""

    tag: int
    exchange: str
    properties: BasicProperties
    body: bytes
    #: By a monotonic clock.
    received_at: float = field(default_factory=time.monotonic)


class ConsumerChannel:
    """A channel on which the broker pushes messages of one queue while a consumer runs."""

    def __init__(self, connection: AmqpConnection, queue: str, *, on_change: Callable[[], None] | None = None) -> None:
        """Open the channel.

        :param on_change: called in the connection's thread when a message has come or the channel has ended.
        """
        self.queue = queue
        self._on_change = on_change
        self.channel = connection.open_channel()
        self._connection = connection
        self._buffer: deque[AmqpMessage] = deque()
        #: Delivery tags of unsettled messages to their consumers, in the order of delivery.
        self._unsettled: dict[int, str] = {}
        self._arrived = threading.Condition()
        self._ended = False
        self.channel.on_closed.append(lambda _reason: self._end())
        self.channel.raw.add_on_cancel_callback(lambda _frame: self._end())

    @property
    def is_open(self) -> bool:
        """Whether messages can come and be settled, as far as known."""
        return self._connection.is_open and not self._ended

    def begin(self, *, prefetch: int, **arguments: Any) -> str:
        """Start a consumer with up to ``prefetch`` unsettled messages and return its tag."""
        try:
            self.channel.call("basic_qos", prefetch_count=prefetch)
            begun = self.channel.call(
                "basic_consume", queue=self.queue, on_message_callback=self._on_message, arguments=arguments
            )
        except AMQPError as error:
            raise translate(error, self._connection.config) from error
        tag: str = begun.method.consumer_tag
        return tag

    def end(self, consumer_tag: str) -> None:
        """Cancel a consumer unless the broker has done so; keep the messages that have arrived."""

        def begin(future: Future[None]) -> None:
            if consumer_tag in self.channel.raw.consumer_tags:
                self.channel.raw.basic_cancel(consumer_tag, callback=lambda _frame: resolve(future, None))
                # Otherwise the library rejects messages that come before the answer, which all versions count as
                # deliveries.
                self.channel.raw._cancelled.discard(consumer_tag)
            else:
                resolve(future, None)

        try:
            self.channel.wait_for(begin)
        except AMQPError as error:
            raise translate(error, self._connection.config) from error

    def take(self, limit: int, *, wait: float = 0.0) -> list[AmqpMessage]:
        """Return up to ``limit`` messages; if there is none, wait that many seconds for the first."""
        deadline = time.monotonic() + wait
        with self._arrived:
            while not self._buffer and self.is_open and (left := deadline - time.monotonic()) > 0:
                self._arrived.wait(left)
            return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        """Acknowledge a message, or all up to it."""
        self._forget(tag, multiple=multiple)
        self.channel.send("basic_ack", delivery_tag=tag, multiple=multiple)

    def give_back(self, tags: Iterable[int]) -> None:
        """Return messages to the queue in the order of their delivery.

        In few commands: of many, a closing channel drops all but the first 32, which counts a delivery.
        """
        for tag, multiple in self._runs(set(tags)):
            self._forget(tag, multiple=multiple)
            self.channel.send("basic_nack", delivery_tag=tag, multiple=multiple, requeue=True)

    def close(self) -> None:
        """Close the channel; unsettled messages go back to the queue."""
        self.channel.close()

    def _runs(self, tags: set[int]) -> Iterator[tuple[int, bool]]:
        """Return commands that cover exactly these tags, each as the last tag and whether it is for all up to it.

        A command for all up to a tag is possible where no earlier message stays unsettled. It keeps the order of one
        consumer only, because RabbitMQ goes through the consumers in any order.
        """
        with self._arrived:
            unsettled = list(self._unsettled.items())
        run, of, is_first = list[int](), "", True
        for tag, consumer in unsettled:
            is_next = is_first and tag in tags and consumer == of and len(run) < MOST_TOGETHER
            if run and not is_next:
                yield run[-1], is_first
                run = []
            if tag in tags:
                run, of = [*run, tag], consumer
            else:
                is_first = False
        if run:
            yield run[-1], is_first

    def _forget(self, tag: int, *, multiple: bool) -> None:
        with self._arrived:
            for settled in [each for each in self._unsettled if each <= tag] if multiple else [tag]:
                self._unsettled.pop(settled, None)

    def _on_message(
        self, _channel: Channel, method: spec.Basic.Deliver, properties: BasicProperties, body: bytes
    ) -> None:
        with self._arrived:
            self._unsettled[method.delivery_tag] = method.consumer_tag
            self._buffer.append(AmqpMessage(method.delivery_tag, method.exchange, properties, body))
            self._notify()

    def _end(self) -> None:
        with self._arrived:
            self._ended = True
            self._notify()

    def _notify(self) -> None:
        self._arrived.notify_all()
        if self._on_change is not None:
            self._on_change()


class Receiver:
    """Receives messages over one connection; the broker redelivers those that are not settled when it ends."""

    def __init__(self, connection: AmqpConnection) -> None:
        self.connection = connection
        #: Part of each handle: messages of another connection cannot be settled here, the broker redelivers them.
        self._name = secrets.token_hex(4)
        self._consumers: dict[str, ConsumerChannel] = {}
        #: Handle to the consumer, the delivery tag, and whether it is a dead letter.
        self._held: dict[str, tuple[ConsumerChannel, int, bool]] = {}

    def receive(self, queue: str, limit: int, now: datetime, *, wait: float = 0.0) -> list[Delivery]:
        """Receive the messages that are there, with a consumer that runs just for them.

        While it waits, a shared consumer sees a new consumer of the queue and hands its messages over.
        """
        ready = min(limit, admin.message_count(self.connection, queue))
        if not ready and not wait:
            return []
        consumer = self._consumer_of(queue)
        consumer_tag = consumer.begin(prefetch=limit)
        received, wait = list[AmqpMessage](), max(wait, FIRST_SECONDS)
        while len(received) < max(1, ready) and (more := consumer.take(limit, wait=wait)):
            received += more
            wait = NEXT_SECONDS
        consumer.end(consumer_tag)
        received += consumer.take(limit)
        return [self._hold(consumer, item, now) for item in received]

    def peek(self, queue: str, limit: int, now: datetime) -> list[Message]:
        """Return the next messages and give them back at once, without counting a delivery."""
        ready = min(limit, admin.message_count(self.connection, queue))
        if ready:
            self._refuse_counted_look()
        looked_at = self._look(queue, ready) if ready else []
        return [wire.decode_message(item.properties, item.body, queue=queue, now=now).message for item in looked_at]

    def ack(self, delivery: Delivery) -> None:
        """Remove a message from its queue."""
        consumer, tag, _ = self._settle(delivery)
        consumer.ack(tag)

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Return messages to where they were in their queue."""
        tags: dict[ConsumerChannel, list[int]] = {}
        for delivery in deliveries:
            consumer, tag, _ = self._settle(delivery)
            tags.setdefault(consumer, []).append(tag)
        for consumer, returned in tags.items():
            consumer.give_back(returned)

    def is_dead_letter(self, delivery: Delivery) -> bool:
        """Whether the message is a dead letter."""
        return self.require_held(delivery)[2]

    def require_held(self, delivery: Delivery) -> tuple[ConsumerChannel, int, bool]:
        """Return what is known of an unsettled message, or refuse one that is settled or lost."""
        held = self._held.get(delivery.handle)
        if held is None or not held[0].is_open:
            raise LifecycleError(
                delivery.message.id,
                "cannot be settled any more: it was settled before, or the connection was lost and the broker delivers"
                " it again",
            )
        return held

    def _refuse_counted_look(self) -> None:
        if self.connection.counts_returns:
            raise BrokerError(
                f"{self.connection.config.name}: {self.connection.server} counts a look at a message as a delivery, and"
                " a queue with a delivery limit drops messages that were delivered too often; receive messages instead,"
                " or use RabbitMQ 4.3 or later",
                may_pass=False,
            )

    def _settle(self, delivery: Delivery) -> tuple[ConsumerChannel, int, bool]:
        held = self.require_held(delivery)
        del self._held[delivery.handle]
        return held

    def _hold(self, consumer: ConsumerChannel, item: AmqpMessage, now: datetime) -> Delivery:
        decoded = wire.decode_message(item.properties, item.body, queue=consumer.queue, now=now)
        handle = f"{self._name}.{consumer.channel.raw.channel_number}.{item.tag}"
        is_dead = decoded.change is Change.DEAD_LETTERED
        self._held[handle] = (consumer, item.tag, is_dead)
        given_up = GivenUp(reason=decoded.reason, at=decoded.scheduled_at) if is_dead else None
        return Delivery(message=decoded.message, handle=handle, given_up=given_up)

    def _consumer_of(self, queue: str) -> ConsumerChannel:
        known = self._consumers.get(queue)
        if known is None or not known.is_open:
            known = self._consumers[queue] = ConsumerChannel(self.connection, queue)
        return known

    def _look(self, queue: str, count: int) -> list[AmqpMessage]:
        """Get messages on a channel of their own and give them back in order before it is closed.

        A closed channel would count a delivery. A quorum queue has the messages back a moment later; until then they
        cannot be received.
        """
        with self.connection.channel() as channel:
            looked_at = [item for _ in range(count) if (item := get(channel, queue)) is not None]
            if looked_at:
                channel.send("basic_nack", delivery_tag=looked_at[-1].tag, multiple=True, requeue=True)
        deadline = time.monotonic() + BACK_SECONDS
        while admin.message_count(self.connection, queue) < len(looked_at) and time.monotonic() < deadline:
            time.sleep(0.005)
        return looked_at


def get(channel: AmqpChannel, queue: str) -> AmqpMessage | None:
    """Return the first message of a queue, unsettled, or None if the queue is empty."""

    def begin(future: Future[AmqpMessage | None]) -> None:
        def on_message(_channel: Any, method: spec.Basic.GetOk, properties: BasicProperties, body: bytes) -> None:
            resolve(future, AmqpMessage(method.delivery_tag, method.exchange, properties, body))

        # `resolve` ignores futures that are done: the answer of an empty queue reaches earlier callbacks too.
        channel.raw.add_callback(lambda _frame: resolve(future, None), [spec.Basic.GetEmpty], one_shot=True)
        channel.raw.basic_get(queue, on_message)

    return channel.wait_for(begin)
