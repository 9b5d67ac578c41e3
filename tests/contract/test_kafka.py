from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.arguments import Limits
from airflow_delay_provider.domain.dead_letters import DeadLetters
from airflow_delay_provider.domain.lifecycle import Change
from tests.contract.broker_contract import BrokerContract
from tests.contract.harness import Abilities, BrokerHarness
from tests.kafkas import create_topic, delete_ladder, dispatching, require_kafka


class KafkaHarness(BrokerHarness):
    """A real Kafka with real time, and a dispatcher beside it that serves the ladder."""

    abilities = Abilities(knows_ids=False, visibility=False, shares_messages=False)
    unit = timedelta(seconds=2)

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self._admin = AdminClient({"bootstrap.servers": config.client["bootstrap.servers"]})
        super().__init__()

    def make_broker(self, limits: Limits | None) -> Broker:
        return KafkaBroker(self.config, limits=limits)

    def prepare_channel(self, name: str) -> None:
        create_topic(self._admin, NewTopic(name, 1))

    def delete_channel(self, name: str) -> None:
        self._admin.delete_topics([name])[name].result(60)

    def pass_time(self, delta: timedelta) -> None:
        # What is due can be seen when its transaction has ended.
        super().pass_time(delta + timedelta(milliseconds=200))


@pytest.fixture(scope="module")
def ladder() -> Iterator[KafkaConfig]:
    """A ladder of this file's own, served all the time."""
    settings = {"ladder": f"contract-{uuid4().hex[:8]}", "partitions": 2}
    config = KafkaConfig.from_settings(settings, host=require_kafka())
    with KafkaBroker(config) as broker:
        broker.create_topology()
        with KafkaBroker(config) as own, dispatching(own):
            yield config
        delete_ladder(broker)


@pytest.fixture
def harness(ladder: KafkaConfig) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(ladder)
    yield harness
    harness.close()


class TestKafkaBroker(BrokerContract):
    """The port, with messages that wait in Kafka's topics."""


def test_messages_of_a_missing_topic_are_replayed_once_the_topic_exists_again(harness: KafkaHarness):
    """A25: it lies in the ladder's own topic of dead letters, and the channel finds it there."""
    channel = harness.channel()
    message = harness.message(channel, after=1)
    position = harness.broker.journal_end()

    def outcome() -> Change:
        return harness.open().find_outcomes([message.id], since=position)[message.id].change

    harness.broker.schedule([message])
    harness.delete_channel(channel)
    selection = DeadLetters(channel=channel)
    harness.wait_until(lambda: harness.broker.count_dead(selection).count == 1, "the message among the dead letters")
    assert outcome() is Change.DEAD_LETTERED
    harness.prepare_channel(channel)
    by_id = harness.open().replay(DeadLetters(message_ids=(message.id, "nobody")))
    assert (by_id.count, by_id.missing) == (1, ("nobody",))
    assert harness.ids_in(channel, 1) == [message.id]
    assert harness.broker.count_dead(selection).count == 0
    assert outcome() is Change.DISPATCHED
