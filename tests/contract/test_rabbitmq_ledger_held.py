"""The same destinations on RabbitMQ, with the wait held by the ledger: every control works."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pika
import pytest

from airflow_delay_provider.brokers.base import Broker
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.schedule import Limits
from airflow_delay_provider.ledger.database import Ledger
from tests.contract.broker_contract import BrokerContract
from tests.contract.harness import Abilities
from tests.contract.ledger_held import LedgerHeldHarness
from tests.rabbits import config_of, counted_looks, require_rabbitmq


class RabbitMQHeldByLedgerHarness(LedgerHeldHarness):
    """RabbitMQ as the target; what a consumer releases with a delay waits there, in real time."""

    abilities = Abilities(visibility=False)
    unit = timedelta(milliseconds=500)

    def __init__(self, ledger: Ledger, url: str) -> None:
        self.config = config_of(url)
        self._preparing = pika.BlockingConnection(pika.URLParameters(f"{url}?heartbeat=0"))
        self._channel = self._preparing.channel()
        with RabbitMQBroker(self.config) as broker:
            broker.create_topology()
        super().__init__(ledger)

    def make_target(self, limits: Limits | None) -> Broker:
        return RabbitMQBroker(self.config, limits=limits, clock=self.clock)

    def prepare_channel(self, name: str) -> None:
        self._channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})

    def close(self) -> None:
        super().close()
        self._preparing.close()


@pytest.fixture
def harness(shared_ledger: Ledger) -> Iterator[RabbitMQHeldByLedgerHarness]:
    harness = RabbitMQHeldByLedgerHarness(shared_ledger, require_rabbitmq())
    with counted_looks():
        yield harness
    harness.close()


@pytest.mark.parametrize("shared_ledger", ["postgresql"], indirect=True)
class TestRabbitMQHeldByLedger(BrokerContract):
    """The port, with RabbitMQ channels behind the ledger."""
