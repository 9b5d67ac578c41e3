from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pika
import pytest

from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.domain.arguments import Limits
from tests.contract.broker_contract import BrokerContract
from tests.contract.consuming import ConsumingContract
from tests.contract.harness import Abilities, BrokerHarness
from tests.contract.replay import ReplayContract
from tests.contract.waiting import SharedConsumerContract
from tests.rabbits import ChannelQueues, config_of, counted_looks, require_rabbitmq


class RabbitMQHarness(BrokerHarness):
    """A real RabbitMQ with real time: a tick of 100 ms keeps the contract's delays apart."""

    abilities = Abilities(recall=False, knows_ids=False, visibility=False, records_times=False)

    def __init__(self, config: RabbitMQConfig, queues: ChannelQueues) -> None:
        self.config = config
        self._queues = queues
        super().__init__()

    def make_broker(self, limits: Limits | None) -> Broker:
        return RabbitMQBroker(self.config, limits=limits)

    def prepare_channel(self, name: str) -> None:
        self._queues.declare(name)

    def close(self) -> None:
        super().close()
        self._queues.delete_all()

    def pass_time(self, delta: timedelta) -> None:
        # What is due is on its way within a tick.
        super().pass_time(delta + timedelta(milliseconds=150))


@pytest.fixture(scope="module")
def ladder(queue_type: str) -> RabbitMQConfig:
    """The configuration of a ladder that exists."""
    config = config_of(require_rabbitmq(), tick=0.1)
    with RabbitMQBroker(config) as broker:
        broker.create_topology()
    return config


@pytest.fixture(scope="module")
def declaring(queue_type: str) -> Iterator[Any]:
    """A channel of the client library that declares the queues of these tests."""
    with pika.BlockingConnection(pika.URLParameters(f"{require_rabbitmq()}?heartbeat=0")) as connection:
        yield connection.channel()


@pytest.fixture
def harness(ladder: RabbitMQConfig, queue_type: str, declaring: Any) -> Iterator[RabbitMQHarness]:
    harness = RabbitMQHarness(ladder, ChannelQueues(declaring, ladder.topology, queue_type))
    with counted_looks():
        yield harness
    harness.close()


@pytest.mark.parametrize("queue_type", ["rabbitmq3-quorum", "rabbitmq4-quorum"], indirect=True)
class TestRabbitMQBroker(BrokerContract):
    """The port, held by RabbitMQ itself."""


@pytest.mark.parametrize("queue_type", ["rabbitmq3-classic"], indirect=True)
class TestClassicQueues:
    """What consumers see of a classic queue; it makes no difference to messages that wait."""

    class TestConsuming(ConsumingContract): ...

    class TestSharedConsumer(SharedConsumerContract): ...

    class TestReplay(ReplayContract): ...
