"""The client of one broker: its connection is opened when needed, and opened again after it was lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from datetime import timedelta

from airflow_delay_provider.brokers.rabbitmq import admin
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection
from airflow_delay_provider.brokers.rabbitmq.management import wake_queues
from airflow_delay_provider.brokers.rabbitmq.publish import Publisher
from airflow_delay_provider.brokers.rabbitmq.receive import Receiver
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import BrokerError, UnknownChannelError

log = logging.getLogger(__name__)

CONNECT_ATTEMPTS = 4
CONNECT_BACKOFF = Backoff(cap=timedelta(seconds=4))
TRUST_CHANNEL_SECONDS = 30.0
#: A starting broker accepts connections before its management API answers and all its queues have leaders.
WAKE_AGAIN_SECONDS = (3.0, 10.0, 30.0)
#: Brokers that a client of this process has lost; the next client that reaches one wakes its queues.
_LOST: set[str] = set()


class RabbitMQClient:
    """Provides the connection, the publisher and the receiver, each open as far as known."""

    def __init__(self, config: RabbitMQConfig) -> None:
        self.config = config
        self._connection: AmqpConnection | None = None
        self._publisher: Publisher | None = None
        self._receiver: Receiver | None = None
        self._has_ladder = False
        #: When channels were last known to be bound.
        self._bound: dict[str, float] = {}

    def connection(self) -> AmqpConnection:
        """Return the open connection."""
        if self._connection is None or not self._connection.is_open:
            self.close()
            self._connection = self._connect()
            if self.config.name in _LOST:
                _LOST.discard(self.config.name)
                self._wake()
        return self._connection

    def connection_with_ladder(self) -> AmqpConnection:
        """Return the open connection; create the ladder if it does not exist."""
        connection = self.connection()
        if not self._has_ladder:
            if admin.is_declared(connection, self.config.topology) is False:
                log.info("Creating the ladder %s on %s", self.config.topology.prefix, self.config.name)
                admin.declare_ladder(connection, self.config.topology)
            self._has_ladder = True
        return connection

    def publisher(self) -> Publisher:
        """Return the publisher; create the ladder if it does not exist."""
        if self._publisher is not None and not self._publisher.is_open:
            # The broker closes it when an exchange is missing, so the ladder may have been deleted.
            self._publisher = None
            self.forget_ladder()
        connection = self.connection_with_ladder()
        if self._publisher is None:
            self._publisher = Publisher(connection)
        return self._publisher

    def bind(self, channel: str) -> None:
        """Make sure that the ladder leads to a channel; checked again after ``TRUST_CHANNEL_SECONDS``."""
        connection, now = self.connection_with_ladder(), time.monotonic()
        if now - self._bound.get(channel, -TRUST_CHANNEL_SECONDS) >= TRUST_CHANNEL_SECONDS:
            try:
                admin.bind_channel(connection, self.config.topology, channel)
            except UnknownChannelError:
                if admin.is_declared(connection, self.config.topology) is not False:
                    raise
                # The ladder is missing, not the channel: it was deleted meanwhile.
                self.forget_ladder()
                admin.bind_channel(self.connection_with_ladder(), self.config.topology, channel)
            self._bound[channel] = now

    def receiver(self) -> Receiver:
        """Return the receiver; it cannot settle messages of a lost connection."""
        connection = self.connection()
        if self._receiver is None or self._receiver.connection is not connection:
            self._receiver = Receiver(connection)
        return self._receiver

    def forget_ladder(self) -> None:
        """Check again whether the ladder and its channels exist before the next use."""
        self._has_ladder = False
        self._bound.clear()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            if not self._connection.is_open:
                _LOST.add(self.config.name)
            self._connection.close()
        self._connection = self._publisher = self._receiver = None

    def _wake(self) -> None:
        """Wake the queues of a broker that is back, several times because not all of them are up yet."""
        if self.config.management_url is None:
            return
        log.info("%s is back; waking the queues of its ladders", self.config.name)
        wake_queues(self.config)
        for seconds in WAKE_AGAIN_SECONDS:
            again = threading.Timer(seconds, wake_queues, [self.config])
            again.daemon = True
            again.start()

    def _connect(self) -> AmqpConnection:
        for attempt in range(1, CONNECT_ATTEMPTS):
            try:
                return AmqpConnection.open(self.config)
            except BrokerError as error:
                if not error.may_pass:
                    raise
                _LOST.add(self.config.name)
                pause = CONNECT_BACKOFF.delay(attempt, random.random).total_seconds()
                log.warning("%s; trying again in %.1f s", error, pause)
                time.sleep(pause)
        return AmqpConnection.open(self.config)
