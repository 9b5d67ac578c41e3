"""The shared consumer on RabbitMQ: a queue shows messages only to those who take them, so they are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.rabbitmq.held_queue import HeldQueue
from airflow_delay_provider.brokers.rabbitmq.topology import is_exchange
from airflow_delay_provider.brokers.shared_consumer import Bound, SharedConsumer, View
from airflow_delay_provider.exceptions import DelayError, UnknownChannelError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.link import Link
    from airflow_delay_provider.brokers.rabbitmq.session import Session
    from airflow_delay_provider.domain.clock import Clock

#: Nobody waits for more: only promised messages are kept.
NOTHING_MORE = Bound(messages=0)


class RabbitMQSharedConsumer(SharedConsumer):
    """One AMQP channel a queue, over the one connection of the client, so that each queue fails for itself."""

    def __init__(self, link: Link, clock: Clock, *, on_change: Callable[[], None]) -> None:
        self._link = link
        self._clock = clock
        self._on_change = on_change
        self._session: Session | None = None
        self._queues: dict[str, HeldQueue] = {}

    def look(self, bounds: Mapping[str, Bound]) -> Mapping[str, View]:
        session = self._link.session()
        if session is not self._session:
            # The broker has handed out again whatever an earlier connection held.
            self._session, self._queues = session, {}
        views = dict[str, View]()
        promised = {name: NOTHING_MORE for name, queue in self._queues.items() if queue.has_promises}
        for name in set(self._queues) - set(bounds) - set(promised):
            self._queues.pop(name).close()
        for name, bound in {**promised, **bounds}.items():
            try:
                views[name] = self._queue(session, name).look(bound)
            except DelayError as error:
                if not session.is_open:
                    raise
                if name in self._queues:
                    self._queues.pop(name).close()
                views[name] = error
        return {name: view for name, view in views.items() if name in bounds}

    def promise(self, channel: str, message_id: str) -> None:
        if channel in self._queues:
            self._queues[channel].promise(message_id)

    @property
    def has_promises(self) -> bool:
        return any(queue.has_promises for queue in self._queues.values())

    def close(self) -> None:
        while self._queues:
            self._queues.popitem()[1].close()

    def _queue(self, session: Session, name: str) -> HeldQueue:
        queue = self._queues.get(name)
        if queue is not None and not queue.is_open:
            # The broker may have ended the consumer only; what it was given goes back with the channel.
            self._queues.pop(name).close()
            queue = None
        if queue is None:
            if is_exchange(name):
                raise UnknownChannelError("channel", f"{name!r} is an exchange", "name a queue bound to it")
            queue = self._queues[name] = HeldQueue(session, name, self._clock, on_change=self._on_change)
        return queue
