"""Queues that could not forward messages wait for 180 s before they try again, unless a client wakes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pika
import pytest

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.message import Message
from tests.rabbits import config_of, fresh_vhost, require_management
from tools.servers.component import wait_for


@dataclass
class Stuck:
    """A message for an exchange that had no route for it, and has one now."""

    broker: RabbitMQBroker
    message: Message
    amqp: pika.channel.Channel

    def has_arrived(self) -> bool:
        method, properties, _body = self.amqp.basic_get("paid", auto_ack=True)
        return method is not None and properties.message_id == self.message.id


def make_stuck(broker: RabbitMQBroker, amqp: pika.channel.Channel, attempt: int) -> Stuck | None:
    """Schedule a message, make its route, and return it unless it took that route by itself, being slow to begin."""
    key = f"order.paid.{attempt}"
    message = Message(channel=f"events:{key}", payload=b"x", deliver_at=broker.clock.now())
    broker.schedule([message])
    # How soon a new queue begins to pass on is the broker's affair: each attempt leaves it more time to try in vain.
    time.sleep(0.1 * 2**attempt)
    amqp.queue_bind("paid", "events", key)
    stuck = Stuck(broker, message, amqp)
    try:
        wait_for(stuck.has_arrived, what="the message arrives by itself", seconds=2)
    except TimeoutError:
        return stuck
    return None


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    with fresh_vhost() as url, pika.BlockingConnection(pika.URLParameters(f"{url}?heartbeat=0")) as connection:
        amqp = connection.channel()
        amqp.exchange_declare("events", "topic", durable=True)
        amqp.queue_declare("paid", durable=True)
        with RabbitMQBroker(config_of(url, management_url=require_management())) as broker:
            yield next(found for attempt in range(10) if (found := make_stuck(broker, amqp, attempt)))


def test_creating_the_topology_again_wakes_queues_that_wait_before_they_try_again(stuck: Stuck) -> None:
    """C14"""
    stuck.broker.create_topology()
    wait_for(stuck.has_arrived, what="the message arrives long before 180 s", seconds=60)


def test_a_client_that_comes_back_wakes_the_queues(stuck: Stuck) -> None:
    """C14: after a restart of the broker, messages that waited for a route are forwarded."""
    stuck.broker._client.connection().close()
    stuck.broker.close()
    with RabbitMQBroker(stuck.broker.config) as another:
        another.check()
    wait_for(stuck.has_arrived, what="the message arrives long before 180 s", seconds=60)
