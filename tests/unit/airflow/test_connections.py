"""From an Airflow connection to its broker, by its type."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.brokers.ledger_held import LedgerHeldBroker
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.hooks.delay import DelayHook, open_destination
from airflow_delay_provider.hooks.kafka import KafkaHook

SECRET = "s3cret-passw0rd"


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Defines a connection and returns its id."""

    def define_connection(conn_id: str = "stream", **fields: Any) -> str:
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(fields))
        return conn_id

    return define_connection


def kafka_of(conn_id: str) -> KafkaBroker:
    with closing(DelayHook(conn_id)) as hook:
        broker = hook.get_conn()
        assert isinstance(broker, KafkaBroker)
        return broker


def test_a_connection_of_our_own_type_gives_the_broker_all_of_its_fields(define: Any) -> None:
    """A22"""
    extra = {"ladder": "billing", "partitions": 2, "max_payload_bytes": 9, "security.protocol": None}
    conn_id = define(
        conn_type="delay_kafka", host="kafka1,kafka2:9093", port=9094, login="me", password=SECRET, extra=extra
    )
    broker = kafka_of(conn_id)
    assert broker.config.client == {
        "bootstrap.servers": "kafka1:9094,kafka2:9093",
        "sasl.username": "me",
        "sasl.password": SECRET,
        "sasl.mechanism": "PLAIN",
        "security.protocol": "SASL_SSL",
    }
    assert broker.topology == Topology(name="billing", partitions=2)
    assert broker.limits.max_payload_bytes == 9


def test_a_connection_of_the_official_provider_serves_too(define: Any) -> None:
    """A22"""
    extra = {"bootstrap.servers": "kafka:9092", "group.id": "billing", "client.id": "airflow", "ladder": "billing"}
    broker = kafka_of(define(conn_type="kafka", extra=extra))
    assert broker.config.client == {"bootstrap.servers": "kafka:9092", "client.id": "airflow"}
    assert (broker.config.consumer_group, broker.topology.name) == ("billing", "billing")


@pytest.mark.parametrize("conn_type", ["delay_kafka", "kafka"])
def test_the_ledger_may_hold_messages_for_kafka(define: Any, conn_type: str, sqlite_url: str) -> None:
    """A5, A20"""
    conn_id = define(conn_type=conn_type, host="kafka", extra={"hold": "ledger", "ledger_url": sqlite_url})
    with closing(DelayHook(conn_id)) as hook:
        assert isinstance(hook.get_conn(), LedgerHeldBroker)
    assert type(open_destination(conn_id)) is KafkaBroker


def test_the_hook_has_a_connection_of_its_own(define: Any) -> None:
    define("delay_kafka_default", conn_type="delay_kafka", host="kafka")
    with closing(KafkaHook()) as hook:
        assert isinstance(hook.get_conn(), KafkaBroker)


def test_the_connection_form_hears_what_is_wrong(define: Any) -> None:
    """A12"""
    with closing(KafkaHook(define(conn_type="delay_kafka"))) as hook:
        assert hook.test_connection() == (
            False,
            "bootstrap.servers: is not given; set the connection's host, or bootstrap.servers in its extra",
        )


def test_a_type_that_no_broker_has_is_refused_with_the_types_that_one_has(define: Any) -> None:
    """A12"""
    with pytest.raises(ConfigurationError, match=r"has type 'redis'; use one of delay, rabbitmq, delay_kafka, kafka$"):
        open_destination(define(conn_type="redis"))


@pytest.mark.parametrize(
    ("conn_type", "library", "extra"),
    [
        ("rabbitmq", "pika", "rabbitmq"),
        ("delay_kafka", "confluent_kafka", "kafka"),
        ("kafka", "confluent_kafka", "kafka"),
    ],
)
def test_a_client_library_that_is_missing_is_named_with_what_brings_it(
    define: Any, conn_type: str, library: str, extra: str
) -> None:
    """A12"""
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from airflow_delay_provider.exceptions import ConfigurationError\n"
        "from airflow_delay_provider.hooks.delay import DelayHook\n"
        "try:\n    DelayHook('stream').get_conn()\n"
        "except ConfigurationError as error:\n    print(error)"
    )
    define(conn_type=conn_type, host="nowhere")
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == (
        f"connections of type {conn_type} need {library}; install airflow-delay-provider[{extra}]"
    )
