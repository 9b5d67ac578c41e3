"""The same destinations on Kafka, with the wait held by the ledger: no Kafka dispatcher is needed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.arguments import Limits
from tests.contract.broker_contract import BrokerContract
from tests.contract.harness import Abilities
from tests.contract.ledger_held import LedgerHeldHarness
from tests.kafkas import create_topic, require_kafka


class KafkaHeldByLedgerHarness(LedgerHeldHarness):
    """Kafka as the target; what a consumer releases with a delay waits there, in real time."""

    abilities = Abilities(visibility=False, shares_messages=False)
    unit = timedelta(milliseconds=500)

    def __init__(self, ledger: Ledger, config: KafkaConfig) -> None:
        self.config = config
        self._admin = AdminClient({"bootstrap.servers": config.client["bootstrap.servers"]})
        super().__init__(ledger)

    def make_target(self, limits: Limits | None) -> Broker:
        return KafkaBroker(self.config, limits=limits, clock=self.clock)

    def prepare_channel(self, name: str) -> None:
        create_topic(self._admin, NewTopic(name, 1))


@pytest.fixture(scope="module")
def config() -> Iterator[KafkaConfig]:
    config = KafkaConfig.from_settings({"ladder": f"held-{uuid4().hex[:8]}", "partitions": 1}, host=require_kafka())
    with KafkaBroker(config) as broker:
        broker.create_topology()
        yield config
        broker.delete_topology(even_if_messages_wait=True)


@pytest.fixture
def harness(shared_ledger: Ledger, config: KafkaConfig) -> Iterator[KafkaHeldByLedgerHarness]:
    harness = KafkaHeldByLedgerHarness(shared_ledger, config)
    yield harness
    harness.close()


@pytest.mark.parametrize("shared_ledger", ["sqlite"], indirect=True)
class TestKafkaHeldByLedger(BrokerContract):
    """The port, with Kafka topics behind the ledger."""
