"""The same destinations on RabbitMQ, with the wait held by the ledger: every control works."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pika
import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.domain.arguments import Limits
from tests.contract.broker_contract import BrokerContract
from tests.contract.harness import Abilities
from tests.contract.ledger_held import LedgerHeldHarness
from tests.rabbits import ChannelQueues, config_of, counted_looks, require_rabbitmq


class RabbitMQHeldByLedgerHarness(LedgerHeldHarness):
    """RabbitMQ as the target; what a consumer releases with a delay waits there, in real time."""

    abilities = Abilities(visibility=False)
    unit = timedelta(milliseconds=500)

    def __init__(self, ledger: Ledger, config: RabbitMQConfig, queues: ChannelQueues) -> None:
        self.config = config
        self._queues = queues
        super().__init__(ledger)

    def make_target(self, limits: Limits | None) -> Broker:
        return RabbitMQBroker(self.config, limits=limits, clock=self.clock)

    def prepare_channel(self, name: str) -> None:
        self._queues.declare(name)

    def close(self) -> None:
        super().close()
        self._queues.delete_all()


@pytest.fixture(scope="module")
def ladder() -> RabbitMQConfig:
    """The configuration of a ladder that exists."""
    config = config_of(require_rabbitmq())
    with RabbitMQBroker(config) as broker:
        broker.create_topology()
    return config


@pytest.fixture(scope="module")
def declaring() -> Iterator[Any]:
    """A channel of the client library that declares the queues of these tests."""
    with pika.BlockingConnection(pika.URLParameters(f"{require_rabbitmq()}?heartbeat=0")) as connection:
        yield connection.channel()


@pytest.fixture
def harness(shared_ledger: Ledger, ladder: RabbitMQConfig, declaring: Any) -> Iterator[RabbitMQHeldByLedgerHarness]:
    harness = RabbitMQHeldByLedgerHarness(shared_ledger, ladder, ChannelQueues(declaring, ladder.topology))
    with counted_looks():
        yield harness
    harness.close()


@pytest.mark.parametrize("shared_ledger", ["postgresql"], indirect=True)
class TestRabbitMQHeldByLedger(BrokerContract):
    """The port, with RabbitMQ channels behind the ledger."""
