from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pika
import pytest

from airflow_delay_provider.brokers.base import Broker
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.schedule import Limits
from tests.contract.broker_contract import BrokerContract
from tests.contract.harness import Abilities, BrokerHarness
from tests.rabbits import config_of, counted_looks, require_rabbitmq


class RabbitMQHarness(BrokerHarness):
    """A real RabbitMQ with real time: a tick of 100 ms keeps the contract's delays apart."""

    abilities = Abilities(recall=False, knows_ids=False, visibility=False)

    def __init__(self, url: str, queue_type: str) -> None:
        self.config = config_of(url, tick=0.1)
        self.queue_type = queue_type
        self._preparing = pika.BlockingConnection(pika.URLParameters(f"{url}?heartbeat=0"))
        self._channel = self._preparing.channel()
        super().__init__()
        self.broker.create_topology()  # type: ignore[attr-defined]

    def make_broker(self, limits: Limits | None) -> Broker:
        return RabbitMQBroker(self.config, limits=limits)

    def prepare_channel(self, name: str) -> None:
        self._channel.queue_declare(name, durable=True, arguments={"x-queue-type": self.queue_type})

    def pass_time(self, delta: timedelta) -> None:
        # What is due is on its way within a tick.
        super().pass_time(delta + timedelta(milliseconds=150))

    def close(self) -> None:
        super().close()
        self._preparing.close()


@pytest.fixture
def harness(queue_type: str) -> Iterator[RabbitMQHarness]:
    harness = RabbitMQHarness(require_rabbitmq(), queue_type)
    with counted_looks():
        yield harness
    harness.close()


class TestRabbitMQBroker(BrokerContract):
    """The port, held by RabbitMQ itself."""
