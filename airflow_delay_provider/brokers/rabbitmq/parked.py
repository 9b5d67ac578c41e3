"""The queue of parked messages, taken out one by one and given back unless they were settled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Self

from pika.exceptions import AMQPError

from airflow_delay_provider.brokers.rabbitmq import declaring, wire
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.brokers.rabbitmq.receiving import BACK_SECONDS, get
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.exceptions import UnknownChannelError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.session import Session

AT_ONCE = 500


class ParkedMessages:
    """What was parked before it was opened; a message that is parked meanwhile is left for another time.

    At the end everything that was not acknowledged goes back, by a rejection that RabbitMQ 4 does not count as a failed
    delivery.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue = session.config.topology.unroutable
        self._channel = session.open_channel()
        self._left = self._count()
        self._unsettled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Zero stands for all that are not settled.
        self._channel.tell("basic_nack", delivery_tag=0, multiple=True, requeue=True)
        self._channel.close()
        # The broker has them back a moment later; until then nobody could count or take them.
        deadline = time.monotonic() + BACK_SECONDS
        while self._session.is_open and self._count() < self._unsettled and time.monotonic() < deadline:
            time.sleep(0.005)

    def take(self, limit: int, clock: Clock) -> dict[int, Message]:
        """Return the next messages by the tags with which they are settled."""
        taken: dict[int, Message] = {}
        try:
            while self._left and len(taken) < limit:
                pushed = get(self._channel, self._queue)
                if pushed is None:
                    self._left = 0
                    break
                self._left -= 1
                self._unsettled += 1
                read = wire.read_message(pushed.properties, pushed.body, queue=self._queue, now=clock.now())
                taken[pushed.tag] = read.message
        except AMQPError as error:
            raise translate(error, self._session.config) from error
        return taken

    def take_all(self, clock: Clock) -> Iterator[Message]:
        """Return all messages."""
        while batch := self.take(AT_ONCE, clock):
            yield from batch.values()

    def ack(self, tags: Iterable[int]) -> None:
        """Remove messages from the queue."""
        for tag in tags:
            self._channel.tell("basic_ack", delivery_tag=tag)
            self._unsettled -= 1

    def _count(self) -> int:
        try:
            return declaring.message_count(self._session, self._queue)
        except UnknownChannelError:
            return 0
