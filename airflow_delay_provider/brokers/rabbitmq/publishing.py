"""Many messages on their way at once, each confirmed by the broker or named as unconfirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from itertools import takewhile
from typing import TYPE_CHECKING

from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.exceptions import BrokerError, Reach

if TYPE_CHECKING:
    from pika import spec
    from pika.channel import Channel
    from pika.frame import Method as MethodFrame

    from airflow_delay_provider.brokers.rabbitmq.session import Session
    from airflow_delay_provider.domain.message import Message

#: Most messages, and most bytes of payload, that wait for their confirmation at a time.
WINDOW = 1000
WINDOW_BYTES = 8 * 1024 * 1024

#: Exchange, routing key and properties of a message that is published at this moment.
Prepare = Callable[["Message"], tuple[str, str, BasicProperties]]


class Publisher:
    """A channel in confirm mode. A call returns when all its messages are confirmed and raises otherwise."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._channel = session.open_channel()
        self._tag = 0
        self._batch: _Batch | None = None
        self._channel.ask("confirm_delivery", ack_nack_callback=self._on_confirm)
        self._channel.raw.add_on_return_callback(self._on_return)
        self._channel.on_closed.append(self._on_closed)

    @property
    def is_open(self) -> bool:
        """Whether it can be used, as far as known."""
        return self._session.is_open and self._channel.closed is None

    def publish(self, messages: Sequence[Message], prepare: Prepare) -> None:
        """Publish all; on any failure raise with the ids that are not confirmed.

        ``prepare`` is asked just before a message leaves, so that its delay is counted from then.
        """
        batch = _Batch(messages, prepare)

        def begin(done: Future[None]) -> None:
            if self._channel.closed is not None:
                raise self._channel.closed
            batch.done, self._batch = done, batch
            self._pump()

        try:
            self._wait(self._session.start(begin), batch)
            batch.require_confirmed(self._session.config.name)
        except Exception as error:
            told = translate(error, self._session.config)
            told.unconfirmed = batch.unconfirmed()
            raise told from error
        finally:
            self._batch = None

    def _wait(self, done: Future[None], batch: _Batch) -> None:
        """Wait as long as confirmations keep coming."""
        while True:
            before = batch.confirmed
            try:
                return done.result(self._session.config.confirm_seconds)
            except FutureTimeoutError:
                if batch.confirmed == before:
                    raise self._session.silent() from None

    # -- in the session's thread ---------------------------------------------------------------------------------

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
    """What became of the messages of one call."""

    def __init__(self, messages: Sequence[Message], prepare: Prepare) -> None:
        self.messages = messages
        self.prepare = prepare
        self.done: Future[None] | None = None
        self.returned: dict[str, str] = {}
        self.confirmed = 0
        self._next = 0
        #: Delivery tag to position, in the order of publishing.
        self._open: dict[int, int] = {}
        self._open_bytes = 0
        self._nacked: list[int] = []

    def has_room(self) -> bool:
        """Whether there is a message that may leave now."""
        return self._next < len(self.messages) and len(self._open) < WINDOW and self._open_bytes < WINDOW_BYTES

    def take(self, tag: int) -> Message:
        """Return the next message, which is published with this delivery tag."""
        message = self.messages[self._next]
        self._open[tag] = self._next
        self._open_bytes += len(message.payload)
        self._next += 1
        return message

    def settle(self, tag: int, *, multiple: bool, nacked: bool) -> None:
        """Note the broker's answer to one message, or to all up to it."""
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
        """Whether the broker has answered to every message."""
        return self._next == len(self.messages) and not self._open

    def unconfirmed(self) -> tuple[str, ...]:
        """Return the ids of all messages that are not known to be stored."""
        positions = [*self._nacked, *self._open.values(), *range(self._next, len(self.messages))]
        return (*(self.messages[position].id for position in sorted(positions)), *self.returned)

    def require_confirmed(self, broker: str) -> None:
        """Raise when a message was refused or had nowhere to go."""
        if self._nacked:
            raise BrokerError(
                f"{broker}: refused {len(self._nacked)} of {len(self.messages)} messages, a queue is full;"
                " consume what waits or raise its max_length, then publish these again",
                reach=Reach.CHANNEL,
            )
        if self.returned:
            raise BrokerError(
                f"{broker}: {len(self.returned)} of {len(self.messages)} messages have no route"
                f" ({next(iter(self.returned.values()))}); look with `airflow delay topology verify`",
                reach=Reach.CHANNEL,
            )
