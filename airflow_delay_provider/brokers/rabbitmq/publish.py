"""Publishing many messages at once, each confirmed by the broker or reported as unconfirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import takewhile
from typing import TYPE_CHECKING

from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.domain.exceptions import BrokerError, Reach

if TYPE_CHECKING:
    from pika import spec
    from pika.channel import Channel
    from pika.frame import Method as MethodFrame

    from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection
    from airflow_delay_provider.domain.message import Message

#: Most messages, and most bytes of payload, that may be unconfirmed at a time.
WINDOW = 1000
WINDOW_BYTES = 8 * 1024 * 1024

#: Returns exchange, routing key and properties of a message that is published now.
Prepare = Callable[["Message"], tuple[str, str, BasicProperties]]


class Publisher:
    """A channel in confirm mode. A call returns when all its messages are confirmed and raises otherwise."""

    def __init__(self, connection: AmqpConnection) -> None:
        self._connection = connection
        self._channel = connection.open_channel()
        self._tag = 0
        self._batch: _Batch | None = None
        self._channel.call("confirm_delivery", ack_nack_callback=self._on_confirm)
        self._channel.raw.add_on_return_callback(self._on_return)
        self._channel.on_closed.append(self._on_closed)

    @property
    def is_open(self) -> bool:
        """Whether it is usable, as far as known."""
        return self._connection.is_open and self._channel.closed is None

    def publish(self, messages: Sequence[Message], prepare: Prepare) -> None:
        """Publish all; on any failure raise an error with the ids that are not confirmed.

        ``prepare`` is called just before a message is sent, so that its delay is counted from then.
        """
        batch = _Batch(messages, prepare)

        def begin(done: Future[None]) -> None:
            if self._channel.closed is not None:
                raise self._channel.closed
            batch.done, self._batch = done, batch
            self._pump()

        try:
            self._wait(self._connection.start(begin), batch)
            batch.require_confirmed(self._connection.config.name)
        except Exception as error:
            translated = translate(error, self._connection.config)
            translated.unconfirmed = batch.unconfirmed()
            raise translated from error
        finally:
            self._batch = None

    def _wait(self, done: Future[None], batch: _Batch) -> None:
        """Wait while confirmations keep coming."""
        while True:
            before = batch.confirmed
            try:
                return done.result(self._connection.config.confirm_seconds)
            except FutureTimeoutError:
                if batch.confirmed == before:
                    raise self._connection.no_answer() from None

    # -- in the connection's thread ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        batch = self._batch
        if batch is None or batch.done is None:
            return
        publish = self._channel.raw.basic_publish
        while batch.has_room():
            message = batch.take(self._tag + 1)
            exchange, key, properties = batch.prepare(message)
            publish(exchange, key, message.payload, properties, mandatory=True)
            self._tag += 1
        if batch.is_settled() and not batch.done.done():
            batch.done.set_result(None)

    def _on_confirm(self, frame: MethodFrame) -> None:
        if self._batch is not None:
            method = frame.method
            self._batch.settle(method.delivery_tag, multiple=method.multiple, nacked=method.NAME == "Basic.Nack")
            self._pump()

    def _on_return(self, _channel: Channel, method: spec.Basic.Return, properties: BasicProperties, _: bytes) -> None:
        if self._batch is not None:
            self._batch.returned[properties.message_id or ""] = method.reply_text

    def _on_closed(self, reason: BaseException) -> None:
        if self._batch is not None and self._batch.done is not None and not self._batch.done.done():
            self._batch.done.set_exception(reason)


class _Batch:
    """The state of the messages of one call."""

    def __init__(self, messages: Sequence[Message], prepare: Prepare) -> None:
        self.messages = messages
        self.prepare = prepare
        self.done: Future[None] | None = None
        self.returned: dict[str, str] = {}
        self.confirmed = 0
        self._next = 0
        #: Delivery tag to index of the message, in the order of publishing.
        self._open: dict[int, int] = {}
        self._open_bytes = 0
        self._nacked: list[int] = []

    def has_room(self) -> bool:
        """Whether another message may be published now."""
        return self._next < len(self.messages) and len(self._open) < WINDOW and self._open_bytes < WINDOW_BYTES

    def take(self, tag: int) -> Message:
        """Return the next message, to be published with this delivery tag."""
        message = self.messages[self._next]
        self._open[tag] = self._next
        self._open_bytes += len(message.payload)
        self._next += 1
        return message

    def settle(self, tag: int, *, multiple: bool, nacked: bool) -> None:
        """Record the broker's answer to one message, or to all up to it."""
        tags = list(takewhile(tag.__ge__, self._open)) if multiple else [tag]
        for each in tags:
            position = self._open.pop(each, None)
            if position is None:
                continue
            self._open_bytes -= len(self.messages[position].payload)
            if nacked:
                self._nacked.append(position)
            else:
                self.confirmed += 1

    def is_settled(self) -> bool:
        """Whether the broker has answered for every message."""
        return self._next == len(self.messages) and not self._open

    def unconfirmed(self) -> tuple[str, ...]:
        """Return the ids of all messages that may not be stored."""
        positions = [*self._nacked, *self._open.values(), *range(self._next, len(self.messages))]
        return (*(self.messages[position].id for position in sorted(positions)), *self.returned)

    def require_confirmed(self, broker: str) -> None:
        """Raise if a message was refused or had no route."""
        if self._nacked:
            raise BrokerError(
                f"{broker}: refused {len(self._nacked)} of {len(self.messages)} messages because a queue is full;"
                " consume messages or raise its max_length, then publish these again",
                reach=Reach.CHANNEL,
            )
        if self.returned:
            raise BrokerError(
                f"{broker}: {len(self.returned)} of {len(self.messages)} messages have no route"
                f" ({next(iter(self.returned.values()))}); run `airflow delay topology verify`",
                reach=Reach.CHANNEL,
            )
