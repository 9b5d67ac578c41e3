"""The one connection of a client: opened when it is needed, and anew when it was lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from datetime import timedelta

from airflow_delay_provider.brokers.rabbitmq import declaring
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.management import wake_queues
from airflow_delay_provider.brokers.rabbitmq.publishing import Publisher
from airflow_delay_provider.brokers.rabbitmq.receiving import Receiver
from airflow_delay_provider.brokers.rabbitmq.session import Session
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.exceptions import BrokerError, UnknownChannelError

log = logging.getLogger(__name__)

CONNECT_ATTEMPTS = 4
TRUST_CHANNEL_SECONDS = 30.0
#: A starting broker accepts connections before its management answers and all its queues have leaders.
WAKE_AGAIN_SECONDS = (3.0, 10.0, 30.0)
#: Brokers that this process has missed, whichever client it was; the next one that reaches them wakes their queues.
_AWAY: set[str] = set()


class Link:
    """Gives out what calls need, each open as far as known."""

    def __init__(self, config: RabbitMQConfig) -> None:
        self.config = config
        self._session: Session | None = None
        self._publisher: Publisher | None = None
        self._receiver: Receiver | None = None
        self._ladder_is_there = False
        #: Channels to which this ladder was seen to lead, and when.
        self._bound: dict[str, float] = {}

    def session(self) -> Session:
        """Return the open connection."""
        if self._session is None or not self._session.is_open:
            self.close()
            self._session = self._connect()
            if self.config.name in _AWAY:
                _AWAY.discard(self.config.name)
                self._wake()
        return self._session

    def session_with_ladder(self) -> Session:
        """Return the open connection to a broker on which the ladder exists, created if need be."""
        session = self.session()
        if not self._ladder_is_there:
            if declaring.is_declared(session, self.config.topology) is False:
                log.info("Creating the ladder %s on %s", self.config.topology.prefix, self.config.name)
                declaring.declare(session, self.config.topology)
            self._ladder_is_there = True
        return session

    def publisher(self) -> Publisher:
        """Return the channel that publishes."""
        if self._publisher is not None and not self._publisher.is_open:
            # The broker closes it when an exchange is gone, so the ladder may be.
            self._publisher = None
            self.forget_ladder()
        session = self.session_with_ladder()
        if self._publisher is None:
            self._publisher = Publisher(session)
        return self._publisher

    def bind(self, channel: str) -> None:
        """Make sure that the ladder leads to a channel; one that was found is taken to be there for a while."""
        session, now = self.session_with_ladder(), time.monotonic()
        if now - self._bound.get(channel, -TRUST_CHANNEL_SECONDS) >= TRUST_CHANNEL_SECONDS:
            try:
                declaring.bind_channel(session, self.config.topology, channel)
            except UnknownChannelError:
                if declaring.is_declared(session, self.config.topology) is not False:
                    raise
                # The ladder is what is missing: it was deleted under this client.
                self.forget_ladder()
                declaring.bind_channel(self.session_with_ladder(), self.config.topology, channel)
            self._bound[channel] = now

    def receiver(self) -> Receiver:
        """Return what hands out messages; those of a lost connection are not in its hands."""
        session = self.session()
        if self._receiver is None or self._receiver.session is not session:
            self._receiver = Receiver(session)
        return self._receiver

    def forget_ladder(self) -> None:
        """Look again whether the ladder exists, and where it leads, before it is used next."""
        self._ladder_is_there = False
        self._bound.clear()

    def close(self) -> None:
        """End the connection."""
        if self._session is not None:
            if not self._session.is_open:
                _AWAY.add(self.config.name)
            self._session.close()
        self._session = self._publisher = self._receiver = None

    def _wake(self) -> None:
        """Wake the queues of a broker that is back, again and again for what is still not up."""
        if self.config.management_url is None:
            return
        log.info("%s is back; the queues of its ladders are woken", self.config.name)
        wake_queues(self.config)
        for seconds in WAKE_AGAIN_SECONDS:
            again = threading.Timer(seconds, wake_queues, [self.config])
            again.daemon = True
            again.start()

    def _connect(self) -> Session:
        backoff = Backoff(cap=timedelta(seconds=4))
        for attempt in range(1, CONNECT_ATTEMPTS):
            try:
                return Session.open(self.config)
            except BrokerError as error:
                if not error.may_pass:
                    raise
                _AWAY.add(self.config.name)
                pause = backoff.delay(attempt, random.random).total_seconds()
                log.warning("%s; trying again in %.1f s", error, pause)
                time.sleep(pause)
        return Session.open(self.config)
