"""What a queue or a stream pushes to this client, kept until it is asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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


#: RabbitMQ 3.10 mixes up the order of more messages that are given back in one command.
MOST_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class Pushed:
    """One message as the broker handed it over."""

    tag: int
    exchange: str
    properties: BasicProperties
    body: bytes


class Consumption:
    """A channel on which messages of one queue are pushed while a consumer runs, and settled by hand."""

    def __init__(self, session: Session, queue: str, *, on_change: Callable[[], None] | None = None) -> None:
        """Open the channel.

        :param on_change: called in the session's thread when something has come or the channel has ended.
        """
        self.queue = queue
        self._on_change = on_change
        self.channel = session.open_channel()
        self._session = session
        self._buffer: deque[Pushed] = deque()
        #: The consumer of each message that is not settled, by tag, in the order in which they came.
        self._unsettled: dict[int, str] = {}
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
                # Else the library would reject what comes before the answer, which counts a delivery on every version.
                self.channel.raw._cancelled.discard(consumer_tag)
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
        self._forget(tag, multiple=multiple)
        self.channel.tell("basic_ack", delivery_tag=tag, multiple=multiple)

    def give_back(self, tags: Iterable[int]) -> None:
        """Let the broker hand messages out again, in the order in which they came.

        In few commands: of many a closing channel drops all but the first 32, which counts a delivery.
        """
        for tag, multiple in self._runs(set(tags)):
            self._forget(tag, multiple=multiple)
            self.channel.tell("basic_nack", delivery_tag=tag, multiple=multiple, requeue=True)

    def close(self) -> None:
        """End it; what was not settled goes back."""
        self.channel.close()

    def _runs(self, tags: set[int]) -> Iterator[tuple[int, bool]]:
        """Return the commands that cover just these tags, each as the last tag and whether it is for all up to it.

        A command for all up to a tag is possible where nothing before stays in hand. It keeps the order within one
        consumer only, since RabbitMQ goes through the consumers in any order.
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
            self._buffer.append(Pushed(method.delivery_tag, method.exchange, properties, body))
            self._tell()

    def _end(self) -> None:
        with self._arrived:
            self._ended = True
            self._tell()

    def _tell(self) -> None:
        self._arrived.notify_all()
        if self._on_change is not None:
            self._on_change()
