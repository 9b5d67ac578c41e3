"""Dispatchers find out how real brokers are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from uuid import uuid4

import pytest

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.ledger import broker_status
from airflow_delay_provider.brokers.ledger.broker_status import BrokerStatus
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.dispatcher.check_brokers import CheckBrokers
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.domain.clock import SystemClock
from tests.kafkas import require_kafka
from tests.rabbits import config_of, fresh_vhost, require_management
from tools.servers import component

wait_for = partial(component.wait_for, seconds=60, interval=0.1)


@pytest.fixture
def opened(rabbitmq_version: str) -> Iterator[dict[str, Broker]]:
    """Brokers by connection: one of each kind, one of each kind that is down."""
    with fresh_vhost() as url:
        rabbit = config_of(url, tick=0.1, management_url=require_management())
        ladder = {"ladder": f"checked-{uuid4().hex[:8]}"}
        yield {
            rabbitmq_version: RabbitMQBroker(rabbit),
            "rabbitmq down": RabbitMQBroker(config_of("amqp://someone:passw0rd@127.0.0.1:1/")),
            "kafka": KafkaBroker(KafkaConfig.from_settings(ladder, host=require_kafka())),
            "kafka down": KafkaBroker(KafkaConfig.from_settings(ladder, host="127.0.0.1:1")),
        }


def test_real_brokers_are_described_and_those_that_are_down_delay_nothing(
    sqlite_url: str, opened: dict[str, Broker], rabbitmq_version: str
):
    ledger = Ledger(sqlite_url)
    config = DispatcherConfig(index=tuple(opened))
    loop = CheckBrokers(Context(ledger=ledger, clock=SystemClock(), config=config), opened.__getitem__)

    def statuses() -> dict[str, BrokerStatus]:
        with ledger.read() as connection:
            return {each.conn_id: each for each in broker_status.read_all(connection)}

    began = time.monotonic()
    loop.run_once()
    assert time.monotonic() - began < 5
    wait_for(lambda: {rabbitmq_version, "kafka"} <= statuses().keys(), what="the brokers that answer")

    def is_everything_known() -> bool:
        loop.run_once()
        return statuses().keys() == opened.keys()

    wait_for(is_everything_known, what="the brokers that are down")
    wait_for(lambda: statuses()[rabbitmq_version].clock_skew is not None, what="the clock of RabbitMQ")
    found = statuses()
    rabbit = found[rabbitmq_version]
    assert rabbit.reachable
    assert "RabbitMQ" in (rabbit.description or "")
    assert rabbit.clock_skew is not None
    assert abs(rabbit.clock_skew) < timedelta(seconds=5), "it is the clock of the same machine"
    assert found["kafka"].reachable
    assert found["kafka"].clock_skew is None
    for down in ("rabbitmq down", "kafka down"):
        assert not found[down].reachable
        assert found[down].error
        assert "passw0rd" not in found[down].error
    loop.close()
    ledger.close()
