"""What a queue or a stream pushes to this client, kept until it is asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pika.exceptions import AMQPError

from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.brokers.rabbitmq.session import answer

if TYPE_CHECKING:
    from pika import BasicProperties, spec
    from pika.channel import Channel

    from airflow_delay_provider.brokers.rabbitmq.session import Session


@dataclass(frozen=True, slots=True)
class Pushed:
    """One message as the broker handed it over."""

    tag: int
    exchange: str
    properties: BasicProperties
    body: bytes


class Consumption:
    """A channel on which messages of one queue are pushed while a consumer runs, and settled by hand."""

    def __init__(self, session: Session, queue: str) -> None:
        self.queue = queue
        self.channel = session.open_channel()
        self._session = session
        self._buffer: deque[Pushed] = deque()
        self._arrived = threading.Condition()
        self._ended = False
        self.channel.on_closed.append(lambda _reason: self._end())
        self.channel.raw.add_on_cancel_callback(lambda _frame: self._end())

    @property
    def is_open(self) -> bool:
        """Whether messages can come and be settled, as far as known."""
        return self._session.is_open and not self._ended

    def begin(self, *, prefetch: int, **arguments: Any) -> str:
        """Let the broker push up to ``prefetch`` unsettled messages and return the consumer's tag."""
        try:
            self.channel.ask("basic_qos", prefetch_count=prefetch)
            begun = self.channel.ask(
                "basic_consume", queue=self.queue, on_message_callback=self._on_message, arguments=arguments
            )
        except AMQPError as error:
            raise translate(error, self._session.config) from error
        tag: str = begun.method.consumer_tag
        return tag

    def end(self, consumer_tag: str) -> None:
        """Let the broker push no more; what has arrived stays. One that the broker has ended is not ended again."""

        def begin(future: Future[None]) -> None:
            if consumer_tag in self.channel.raw.consumer_tags:
                self.channel.raw.basic_cancel(consumer_tag, callback=lambda _frame: answer(future, None))
            else:
                answer(future, None)

        try:
            self.channel.wait_for(begin)
        except AMQPError as error:
            raise translate(error, self._session.config) from error

    def take(self, limit: int, *, wait: float = 0.0) -> list[Pushed]:
        """Return up to ``limit`` messages; when there is none, wait that many seconds for the first."""
        deadline = time.monotonic() + wait
        with self._arrived:
            while not self._buffer and self.is_open and (rest := deadline - time.monotonic()) > 0:
                self._arrived.wait(rest)
            return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        """Acknowledge a message, or all up to it."""
        self.channel.tell("basic_ack", delivery_tag=tag, multiple=multiple)

    def give_back(self, tag: int) -> None:
        """Let the broker hand it out again."""
        self.channel.tell("basic_nack", delivery_tag=tag, requeue=True)

    def close(self) -> None:
        """End it; what was not settled goes back."""
        self.channel.close()

    def _on_message(
        self, _channel: Channel, method: spec.Basic.Deliver, properties: BasicProperties, body: bytes
    ) -> None:
        with self._arrived:
            self._buffer.append(Pushed(method.delivery_tag, method.exchange, properties, body))
            self._arrived.notify_all()

    def _end(self) -> None:
        with self._arrived:
            self._ended = True
            self._arrived.notify_all()
