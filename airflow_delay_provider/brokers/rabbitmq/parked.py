"""Messages that had no route, in the queue ``unroutable``: counting them and taking them out for a replay."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Self

from pika.exceptions import AMQPError

from airflow_delay_provider.brokers.rabbitmq import admin, wire
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.brokers.rabbitmq.receive import BACK_SECONDS, get
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.domain.exceptions import UnknownChannelError
from airflow_delay_provider.domain.message import Message

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection

BATCH = 500


class ParkedMessages:
    """The messages that were parked when this was opened; those parked later are left for another time.

    At the end everything that was not acknowledged goes back, by a command that RabbitMQ 4 does not count as a failed
    delivery.
    """

    def __init__(self, connection: AmqpConnection) -> None:
        self._connection = connection
        self._queue = connection.config.topology.unroutable
        self._channel = connection.open_channel()
        self._left = count_parked(connection)
        self._unsettled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Zero stands for all unsettled messages.
        self._channel.send("basic_nack", delivery_tag=0, multiple=True, requeue=True)
        self._channel.close()
        # The queue has them back a moment later; until then they cannot be counted or taken.
        deadline = time.monotonic() + BACK_SECONDS
        while (
            self._connection.is_open
            and count_parked(self._connection) < self._unsettled
            and time.monotonic() < deadline
        ):
            time.sleep(0.005)

    def batches(self, clock: Clock) -> Iterator[dict[int, Message]]:
        """Return all messages in batches, by the tags that acknowledge them."""
        while batch := self._take(clock):
            yield batch

    def ack(self, tags: Iterable[int]) -> None:
        """Remove messages from the queue."""
        for tag in tags:
            self._channel.send("basic_ack", delivery_tag=tag)
            self._unsettled -= 1

    def _take(self, clock: Clock) -> dict[int, Message]:
        taken: dict[int, Message] = {}
        try:
            while self._left and len(taken) < BATCH:
                item = get(self._channel, self._queue)
                if item is None:
                    self._left = 0
                    break
                self._left -= 1
                self._unsettled += 1
                decoded = wire.decode_message(item.properties, item.body, queue=self._queue, now=clock.now())
                taken[item.tag] = decoded.message
        except AMQPError as error:
            raise translate(error, self._connection.config) from error
        return taken


def count_parked(connection: AmqpConnection) -> int:
    """Return how many messages are parked."""
    try:
        return admin.message_count(connection, connection.config.topology.unroutable)
    except UnknownChannelError:
        return 0
