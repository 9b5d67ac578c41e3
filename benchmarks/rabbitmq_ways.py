"""The ways to get messages into RabbitMQ that are compared, each to a quorum queue of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import kombu
from kombu.transport.native_delayed_delivery import (
    MAX_LEVEL,
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
    level_name,
)
from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq import declaring, wire
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.publishing import Prepare, Publisher
from airflow_delay_provider.brokers.rabbitmq.session import Session
from airflow_delay_provider.domain.clock import SystemClock, ceil_ms, floor_ms
from airflow_delay_provider.domain.ladder import Ladder
from airflow_delay_provider.domain.message import Message
from benchmarks.binary_ladder import BinaryLadder
from benchmarks.measuring import expect
from tests.rabbits import config_of

#: The type of all queues, and what the results call the place where messages are kept.
STORE = "quorum"

RAW = "raw publish"
RAW_HEADERS = "raw publish with our headers"
OFF = "ours, journal off"
ON = "ours, journal on"
BINARY = "binary ladder"
KOMBU = "kombu, one by one"

_NAMES = {RAW: "raw", RAW_HEADERS: "headers", OFF: "unjournaled", ON: "journaled", BINARY: "binary", KOMBU: "kombu"}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way. ``publish`` returns when the broker has confirmed all messages."""

    name: str
    channel: str
    publish: Callable[[Sequence[Message]], object]
    #: Where messages lie that are not delivered.
    waits_in: Sequence[str]
    #: None where nothing is delayed.
    ladder: Ladder | None = None
    #: Queues behind the ladder that pass a message on at once, which the broker counts as rests, too.
    relays: int = 0


class Ways:
    """All ways on one broker."""

    def __init__(self, session: Session, ways: Sequence[Way]) -> None:
        self._session = session
        self._ways = {way.name: way for way in ways}

    def __getitem__(self, name: str) -> Way:
        return self._ways[name]

    def __iter__(self) -> Iterator[Way]:
        return iter(self._ways.values())

    def empty(self, way: Way, *, expected: int) -> None:
        """Remove the messages that wait, and make sure that all of them were there."""
        with declaring.calls(self._session) as channel:
            purged = [channel.ask("queue_purge", queue=queue).method.message_count for queue in way.waits_in]
        expect(f"messages that wait, {way.name}", sum(purged), expected)


@contextmanager
def open_ways(url: str) -> Iterator[Ways]:
    """Declare everything; nothing is declared while something is measured."""
    with ExitStack() as stack:
        ours = {
            name: stack.enter_context(RabbitMQBroker(config_of(url, journal=journal)))
            for name, journal in ((OFF, False), (ON, True))
        }
        session = Session.open(ours[OFF].config)
        stack.callback(session.close)
        for name in _NAMES:
            declaring.declare_queue(session, _channel(name))
        connection = stack.enter_context(kombu.Connection(url, transport_options={"confirm_publish": True}))
        ways = [
            _raw(session, RAW, _minimal(_channel(RAW))),
            _raw(session, RAW_HEADERS, _with_our_headers(_channel(RAW_HEADERS))),
            *(_ours(broker, name) for name, broker in ours.items()),
            _binary(session),
            _kombu(connection),
        ]
        yield Ways(session, ways)


def _channel(way: str) -> str:
    return f"bench.{_NAMES[way]}"


def _raw(session: Session, name: str, prepare: Prepare) -> Way:
    publisher = Publisher(session)
    channel = _channel(name)
    return Way(
        name=name,
        channel=channel,
        publish=lambda messages: publisher.publish(messages, prepare),
        waits_in=[channel],
    )


def _minimal(queue: str) -> Prepare:
    properties = BasicProperties(delivery_mode=2)
    return lambda _message: ("", queue, properties)


def _with_our_headers(queue: str) -> Prepare:
    clock = SystemClock()
    return lambda message: ("", queue, wire.write_properties(message, now=clock.now()))


def _ours(broker: RabbitMQBroker, name: str) -> Way:
    broker.create_topology([_channel(name)])
    return Way(
        name=name,
        channel=_channel(name),
        publish=broker.schedule,
        waits_in=[rung.name for rung in broker.topology.rungs()],
        ladder=broker.topology.ladder,
        relays=1,
    )


def _binary(session: Session) -> Way:
    binary, clock, publisher = BinaryLadder(), SystemClock(), Publisher(session)
    channel = _channel(BINARY)
    declaring.declare(session, binary)  # type: ignore[arg-type] - it has all that is asked of a topology
    with declaring.calls(session) as amqp:
        amqp.ask("queue_bind", queue=channel, exchange=binary.level(-1), routing_key=binary.exit_key(channel))

    def prepare(message: Message) -> tuple[str, str, BasicProperties]:
        now = clock.now()
        exchange, key = binary.route(message.channel, ceil_ms(message.deliver_at) - floor_ms(now))
        return exchange, key, wire.write_properties(message, now=now)

    return Way(
        name=BINARY,
        channel=channel,
        publish=lambda messages: publisher.publish(messages, prepare),
        waits_in=[queue.name for queue in binary.queues()],
        ladder=binary.ladder,
    )


def _kombu(connection: kombu.Connection) -> Way:
    """As Celery uses it: at the top level, and each message is confirmed before the next one leaves."""
    prefix, channel, clock = "bench", _channel(KOMBU), SystemClock()
    declare_native_delayed_delivery_exchanges_and_queues(connection, STORE, prefix)
    exchange = kombu.Exchange(f"{prefix}_exchange", type="topic")
    queue = kombu.Queue(channel, exchange, routing_key=channel, queue_arguments={"x-queue-type": STORE})
    queue(connection.default_channel).declare()
    bind_queue_to_native_delayed_delivery_exchange(connection, queue, prefix)
    producer = kombu.Producer(connection.default_channel)

    def publish(messages: Sequence[Message]) -> None:
        for message in messages:
            seconds = -((floor_ms(clock.now()) - ceil_ms(message.deliver_at)) // 1000)
            producer.publish(
                message.payload,
                exchange=level_name(MAX_LEVEL, prefix),
                routing_key=calculate_routing_key(seconds, channel),
                delivery_mode=2,
                content_type=message.content_type,
                content_encoding="binary",
                message_id=message.id,
            )

    waits_in = [level_name(level, prefix) for level in range(MAX_LEVEL + 1)]
    return Way(name=KOMBU, channel=channel, publish=publish, waits_in=waits_in)
