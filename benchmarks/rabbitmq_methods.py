"""The methods of publishing to RabbitMQ that are compared, each with a quorum queue of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import kombu
from kombu.transport.native_delayed_delivery import (
    MAX_LEVEL,
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
    level_name,
)
from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq import admin, wire
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection
from airflow_delay_provider.brokers.rabbitmq.publish import Prepare, Publisher
from airflow_delay_provider.brokers.rabbitmq.topology import AT_LEAST_ONCE, Binding, Exchange, Queue
from airflow_delay_provider.domain.clock import SystemClock, ceil_ms, floor_ms
from airflow_delay_provider.domain.ladder import Ladder
from airflow_delay_provider.domain.message import Message
from benchmarks.measurement import expect
from tests.rabbits import config_of

#: The type of all queues, and what the results call the place where messages are kept.
STORE = "quorum"

RAW = "raw publish"
RAW_HEADERS = "raw publish with our headers"
OFF = "ours, journal off"
ON = "ours, journal on"
ONE = "ours, journal on, one by one"
BINARY = "binary ladder"
KOMBU = "kombu, one by one"

_NAMES = {
    RAW: "raw",
    RAW_HEADERS: "headers",
    OFF: "unjournaled",
    ON: "journaled",
    ONE: "single",
    BINARY: "binary",
    KOMBU: "kombu",
}
#: So slow that they get fewer messages.
ONE_BY_ONE = frozenset({ONE, KOMBU})


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method. ``publish`` returns when the broker has confirmed all messages."""

    name: str
    channel: str
    publish: Callable[[Sequence[Message]], object]
    #: The queues that hold undelivered messages.
    waits_in: Sequence[str]
    #: None where nothing is delayed.
    ladder: Ladder | None = None
    #: Queues behind the ladder that forward at once, which the broker counts too.
    relays: int = 0


class Methods:
    """All methods on one broker."""

    def __init__(self, connection: AmqpConnection, methods: Sequence[Method]) -> None:
        self._connection = connection
        self._methods = {method.name: method for method in methods}

    def __getitem__(self, name: str) -> Method:
        return self._methods[name]

    def __iter__(self) -> Iterator[Method]:
        return iter(self._methods.values())

    def empty(self, method: Method, *, expected: int) -> None:
        """Remove the waiting messages, and check that none was missing."""
        with self._connection.channel() as channel:
            purged = [channel.call("queue_purge", queue=queue).method.message_count for queue in method.waits_in]
        expect(f"messages that wait, {method.name}", sum(purged), expected)


@contextmanager
def open_methods(url: str) -> Iterator[Methods]:
    """Declare everything; nothing is declared while something is measured."""
    with ExitStack() as stack:
        ours = {
            name: stack.enter_context(RabbitMQBroker(config_of(url, journal=journal)))
            for name, journal in ((OFF, False), (ON, True))
        }
        connection = AmqpConnection.open(ours[OFF].config)
        stack.callback(connection.close)
        for name in _NAMES:
            admin.declare_queue(connection, _channel(name))
        kombu_connection = stack.enter_context(kombu.Connection(url, transport_options={"confirm_publish": True}))
        methods = [
            _raw(connection, RAW, _minimal(_channel(RAW))),
            _raw(connection, RAW_HEADERS, _with_our_headers(_channel(RAW_HEADERS))),
            *(_ours(broker, name) for name, broker in ours.items()),
            _ours_one_by_one(ours[ON]),
            _binary(connection),
            _kombu(kombu_connection),
        ]
        yield Methods(connection, methods)


def _channel(method: str) -> str:
    return f"bench.{_NAMES[method]}"


def _raw(connection: AmqpConnection, name: str, prepare: Prepare) -> Method:
    publisher = Publisher(connection)
    channel = _channel(name)
    return Method(
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
    return lambda message: ("", queue, wire.encode_properties(message, now=clock.now()))


def _ours(broker: RabbitMQBroker, name: str) -> Method:
    broker.create_topology([_channel(name)])
    return Method(
        name=name,
        channel=_channel(name),
        publish=broker.schedule,
        waits_in=[rung.name for rung in broker.topology.rungs()],
        ladder=broker.topology.ladder,
        relays=1,
    )


def _ours_one_by_one(broker: RabbitMQBroker) -> Method:
    """A call for each message, as kombu does it."""
    batched = _ours(broker, ONE)

    def publish(messages: Sequence[Message]) -> None:
        for message in messages:
            broker.schedule([message])

    return replace(batched, publish=publish)


def _binary(connection: AmqpConnection) -> Method:
    binary, clock, publisher = BinaryLadder(), SystemClock(), Publisher(connection)
    channel = _channel(BINARY)
    admin.declare_ladder(connection, binary)  # type: ignore[arg-type] - it has all that is asked of a topology
    with connection.channel() as amqp:
        amqp.call("queue_bind", queue=channel, exchange=binary.level(-1), routing_key=binary.exit_key(channel))

    def prepare(message: Message) -> tuple[str, str, BasicProperties]:
        now = clock.now()
        exchange, key = binary.route(message.channel, ceil_ms(message.deliver_at) - floor_ms(now))
        return exchange, key, wire.encode_properties(message, now=now)

    return Method(
        name=BINARY,
        channel=channel,
        publish=lambda messages: publisher.publish(messages, prepare),
        waits_in=[queue.name for queue in binary.queues()],
        ladder=binary.ladder,
    )


def _kombu(kombu_connection: kombu.Connection) -> Method:
    """As Celery uses it: at the top level, and each message is confirmed before the next one leaves."""
    prefix, channel, clock = "bench", _channel(KOMBU), SystemClock()
    declare_native_delayed_delivery_exchanges_and_queues(kombu_connection, STORE, prefix)
    exchange = kombu.Exchange(f"{prefix}_exchange", type="topic")
    queue = kombu.Queue(channel, exchange, routing_key=channel, queue_arguments={"x-queue-type": STORE})
    queue(kombu_connection.default_channel).declare()
    bind_queue_to_native_delayed_delivery_exchange(kombu_connection, queue, prefix)
    producer = kombu.Producer(kombu_connection.default_channel)

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
    return Method(name=KOMBU, channel=channel, publish=publish, waits_in=waits_in)


LEVELS = 28
TICK_MS = 1000


class BinaryLadder:
    """All objects of the ladder; ``admin.declare_ladder`` creates them."""

    journal = False
    shared: frozenset[str] = frozenset()
    #: The exchange that is declared last.
    ready = "bench.binary.ready"

    @cached_property
    def ladder(self) -> Ladder:
        """The holds."""
        longest_ms = TICK_MS << (LEVELS - 1)
        return Ladder.of_digits(tick_ms=TICK_MS, radix=2, cover_ms=longest_ms, longest_hold_ms=longest_ms)

    def level(self, level: int) -> str:
        """Return the exchange that reads the bit of ``level``, and the queue behind it; -1 is the exit."""
        return f"bench.binary.{level if level >= 0 else 'exit'}"

    def route(self, channel: str, delay_ms: int) -> tuple[str, str]:
        """Return the exchange and the routing key of a message that is to arrive after ``delay_ms``."""
        ticks = self.ladder.round_up(delay_ms) // TICK_MS
        return self.level(ticks.bit_length() - 1), f"{'.'.join(f'{ticks:0{LEVELS}b}')}.{channel}"

    def exit_key(self, channel: str) -> str:
        """Return the key by which a channel is bound to the exit."""
        return f"#.{channel}"

    def exchanges(self) -> Iterator[Exchange]:
        """Return one a level, and the exit."""
        for level in range(-1, LEVELS):
            yield Exchange(name=self.level(level), kind="topic")

    def queues(self) -> Iterator[Queue]:
        """Return one a level."""
        for level in range(LEVELS):
            onward = {"x-message-ttl": TICK_MS << level, "x-dead-letter-exchange": self.level(level - 1)}
            yield Queue(name=self.level(level), arguments=AT_LEAST_ONCE | onward)

    def bindings(self) -> Iterator[Binding]:
        """Return, for each level, the targets of a set and of an unset bit."""
        for level in range(LEVELS):
            before = "*." * (LEVELS - 1 - level)
            yield Binding(source=self.level(level), destination=self.level(level), key=f"{before}1.#")
            yield Binding(
                source=self.level(level), destination=self.level(level - 1), key=f"{before}0.#", to_exchange=True
            )
