"""The journal is a stream that may not answer: messages are delivered nevertheless, and recorded once it answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pika
import pytest

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.lifecycle import FROM_THE_START
from airflow_delay_provider.domain.message import Message
from tests.rabbits import config_of, declare_queue, private_node
from tools.servers import component
from tools.servers.rabbitmq import RabbitMQ

CHANNEL = "orders"
#: More than the 32 messages that a queue dead-letters at a time.
MANY = 100

wait_for = partial(component.wait_for, seconds=60, interval=0.1)

_WRITER = """
{ok, Journal} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"delay.v1.journal">>)),
Writer = amqqueue:get_pid(Journal), """


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RabbitMQ]:
    with private_node(tmp_path) as node:
        declare_queue(node.url, CHANNEL, **{"x-queue-type": "quorum"})
        yield node


def messages() -> list[Message]:
    """Return messages that all rest in the same rung."""
    due = datetime.now(UTC) + timedelta(seconds=5)
    return [Message(channel=CHANNEL, payload=b"", deliver_at=due) for _ in range(MANY)]


def receive(broker: RabbitMQBroker, *, seconds: float = 60) -> set[str]:
    received: set[str] = set()

    def got_all() -> bool:
        deliveries = broker.receive(CHANNEL, limit=1000)
        received.update(delivery.message.id for delivery in deliveries)
        broker.ack(deliveries)
        return len(received) >= MANY

    wait_for(got_all, what=f"{MANY} messages arrive", seconds=seconds)
    return received


def test_messages_arrive_while_the_journal_does_not_answer_and_are_recorded_afterwards(node: RabbitMQ) -> None:
    """A rung that dead-letters into the journal itself would get stuck behind the first 32."""
    with RabbitMQBroker(config_of(node.url)) as broker:
        broker.create_topology([CHANNEL])
        scheduled = messages()
        broker.schedule(scheduled)
        node.control("eval", f"{_WRITER} sys:suspend(Writer).")
        assert receive(broker, seconds=20) == {message.id for message in scheduled}
        node.control("eval", f"{_WRITER} sys:resume(Writer).")
        ids = [message.id for message in scheduled]
        wait_for(
            lambda: len(broker.find_outcomes(ids, since=FROM_THE_START)) == MANY, what="all dispatches are recorded"
        )


def test_a_new_leader_of_the_journal_stops_no_rung(node: RabbitMQ) -> None:
    """RabbitMQ 3.10 sends again to a new leader of a stream under other numbers than before, and waits for ever.

    The numbers differ as soon as a queue has dead-lettered messages that did not go to the stream, as happens while a
    broker starts and its bindings come back one after the other.
    """
    with RabbitMQBroker(config_of(node.url)) as broker:
        broker.create_topology([CHANNEL])
        topology = broker.topology
        with closing(pika.BlockingConnection(pika.URLParameters(node.url))) as connection:
            amqp = connection.channel()
            amqp.exchange_unbind(topology.dispatch_log_exchange, topology.dispatch)
            broker.schedule(messages())
            receive(broker)
            amqp.exchange_bind(topology.dispatch_log_exchange, topology.dispatch)
        broker.schedule(scheduled := messages())
        node.control("eval", f"{_WRITER} sys:suspend(Writer).")
        wait_for(lambda: datetime.now(UTC) > scheduled[0].deliver_at + timedelta(seconds=2), what="they are due")
        node.control("eval", f"{_WRITER} exit(Writer, kill).")
        assert receive(broker, seconds=20) == {message.id for message in scheduled}
