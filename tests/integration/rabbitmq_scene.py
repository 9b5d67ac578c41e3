"""A broker with its ladder, the queues of a test, and what arrives in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import Any, Self
from uuid import uuid4

import pika

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock
from tests.rabbits import config_of
from tools.servers import component

PATIENCE_SECONDS = 60
#: What a busy machine may add to a delay; far less than what a message would wait behind another one.
ON_TIME = timedelta(seconds=PATIENCE_SECONDS / 3)

wait_for = partial(component.wait_for, seconds=PATIENCE_SECONDS, interval=0.03)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A message that was received and acknowledged."""

    message: Message
    at: datetime

    @property
    def lateness(self) -> timedelta:
        return self.at - self.message.deliver_at


class Scene:
    """One ladder in one vhost. Tests that share it use queues of their own."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.url = url
        self.settings = {"tick": 0.1, **settings}
        self.broker = self.open()
        self.topology = self.broker.topology
        self.broker.create_topology()

    def open(self, **more: Any) -> RabbitMQBroker:
        """Return another client of the same ladder."""
        return RabbitMQBroker(config_of(self.url, **self.settings | more))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.close()

    @contextmanager
    def amqp(self) -> Iterator[Any]:
        """A channel of the plain client library."""
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            yield connection.channel()

    def queue(self, name: str = "") -> str:
        """Return a new queue."""
        name = name or f"queue-{uuid4().hex}"
        with self.amqp() as amqp:
            amqp.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        return name

    def message(self, channel: str, *, after: float, **options: Any) -> Message:
        """Return a message that is due ``after`` seconds from now."""
        options.setdefault("payload", uuid4().bytes)
        return Message(channel=channel, deliver_at=datetime.now(UTC) + timedelta(seconds=after), **options)

    def schedule_in_time(self, messages: Sequence[Message], *, now: datetime) -> None:
        """Schedule with the delays that the messages have at ``now``, however long that takes."""
        with RabbitMQBroker(self.broker.config, clock=SettableClock(now)) as broker:
            broker.schedule(messages)

    def messages(self, channel: str, count: int, *, after: float) -> list[Message]:
        return [self.message(channel, after=after) for _ in range(count)]

    def collect(self, channel: str, count: int, *, seconds: float = PATIENCE_SECONDS) -> list[Arrival]:
        """Return the next messages of a channel, acknowledged; none of them may be early."""
        arrivals: list[Arrival] = []

        def got_all() -> bool:
            deliveries = self.broker.receive(channel, limit=count - len(arrivals))
            now = datetime.now(UTC)
            arrivals.extend(Arrival(message=delivery.message, at=now) for delivery in deliveries)
            self.broker.ack(deliveries)
            return len(arrivals) >= count

        wait_for(got_all, what=f"{count} messages in {channel}", seconds=seconds)
        assert [each.message.id for each in arrivals if each.lateness < timedelta(0)] == []
        return arrivals

    def count(self, queue: str) -> int:
        """How many messages a queue could hand out now."""
        with self.amqp() as amqp:
            found: int = amqp.queue_declare(queue, passive=True).method.message_count
            return found

    def waiting(self) -> Counter[str]:
        """How many messages wait in each queue of the ladder that has any."""
        with self.amqp() as amqp:
            counts = {
                rung.name: amqp.queue_declare(rung.name, passive=True).method.message_count
                for rung in self.topology.rungs()
            }
        return Counter({name: count for name, count in counts.items() if count})

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Nothing is published inside: the journal has no new message, the ladder is as before."""
        waiting, entered = self.waiting(), self.entered()
        yield
        assert self.entered() - entered == Counter()
        assert self.waiting() == waiting

    def entered(self) -> Counter[str]:
        """How often each message was published so far; its dispatch may be recorded at any later time."""
        mark = self.message(self._marks, after=0, id=f"mark-{uuid4()}")
        self.broker.send([mark])
        entries: list[JournalEntry] = []

        def read_up_to_the_mark() -> bool:
            position = entries[-1].position if entries else FROM_THE_START
            entries.extend(self.broker.read_journal(after=position))
            return any(entry.message_id == mark.id for entry in entries)

        wait_for(read_up_to_the_mark, what="the journal has the last publish", interval=0.01)
        found: Counter[str] = Counter()
        for entry in entries:
            name = entry.message_id
            if not name.startswith("mark-") and not (entry.change is Change.DISPATCHED and name in found):
                found[name] += 1
        return found

    @cached_property
    def _marks(self) -> str:
        return self.queue()


def ids_of(messages: Iterable[Message | Arrival]) -> list[str]:
    return sorted(each.message.id if isinstance(each, Arrival) else each.id for each in messages)
