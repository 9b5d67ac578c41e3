"""From an Airflow connection to its broker, by its type."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.brokers.ledger.ledger_held import LedgerHeldBroker
from airflow_delay_provider.connection_forms import CONNECTION_TYPES
from airflow_delay_provider.domain.exceptions import ConfigurationError
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


def test_the_connection_form_shows_the_error(define: Any) -> None:
    """A12"""
    with closing(KafkaHook(define(conn_type="delay_kafka"))) as hook:
        assert hook.test_connection() == (
            False,
            "bootstrap.servers: is not given; set the connection's host, or bootstrap.servers in its extra",
        )


def test_an_unknown_connection_type_is_refused_with_the_known_ones(define: Any) -> None:
    """A12"""
    with pytest.raises(ConfigurationError, match=r"has type 'redis'; use one of delay, rabbitmq, delay_kafka, kafka$"):
        open_destination(define(conn_type="redis"))


@pytest.mark.parametrize(
    ("conn_type", "extra", "remedy"),
    [
        ("rabbitmq", {"tik": 0.1}, "has an unknown setting 'tik'; did you mean 'tick'?"),
        ("delay_kafka", {"partition": 4}, "has an unknown setting 'partition'; did you mean 'partitions'?"),
        ("delay", {"max-delay": 4}, "has an unknown setting 'max-delay'; did you mean 'max_delay'?"),
        ("delay", {"zzz": 4}, "has an unknown setting 'zzz'; use ledger_url, max_delay, max_payload_bytes, min_delay"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_right_one(
    define: Any, conn_type: str, extra: dict[str, Any], remedy: str
) -> None:
    conn_id = define(conn_type=conn_type, host="nowhere", extra=extra)
    with pytest.raises(ConfigurationError, match=f"^connection 'stream': its extra {re.escape(remedy)}$"):
        open_destination(conn_id)


@pytest.mark.parametrize(
    ("conn_type", "extra"),
    [
        ("kafka", {"bootstrap.servers": "nowhere", "topics": "of another hook"}),
        ("delay_kafka", {"client.id": "airflow"}),
        ("delay", {"sslmode": "verify-full", "ledger_url": None}),
        *((form["connection-type"], dict.fromkeys(form["conn-fields"])) for form in CONNECTION_TYPES),
    ],
)
def test_settings_of_forms_of_client_libraries_and_of_other_providers_are_accepted(
    define: Any, conn_type: str, extra: dict[str, Any]
) -> None:
    open_destination(define(conn_type=conn_type, host="nowhere", extra=extra)).close()


MISSING_LIBRARIES = [
    ("rabbitmq", "pika", "rabbitmq"),
    ("delay_kafka", "confluent_kafka", "kafka"),
    ("kafka", "confluent_kafka", "kafka"),
]
#: Each connection is opened by a process of its own, a copy of one that has imported Airflow.
WITHOUT_LIBRARY = f"""
import os, sys
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.hooks.delay import DelayHook
for conn_type, library, _extra in {MISSING_LIBRARIES!r}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, conn_type
        continue
    assert library not in sys.modules
    sys.modules[library] = None
    try:
        DelayHook("of_type_" + conn_type).get_conn()
    except ConfigurationError as error:
        print(conn_type, error, sep=": ", flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def printed_without_library() -> list[str]:
    connections = {
        f"AIRFLOW_CONN_OF_TYPE_{conn_type.upper()}": json.dumps({"conn_type": conn_type, "host": "nowhere"})
        for conn_type, _, _ in MISSING_LIBRARIES
    }
    environment = os.environ | connections
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(("conn_type", "library", "extra"), MISSING_LIBRARIES)
def test_a_missing_client_library_is_named_with_its_extra(
    printed_without_library: list[str], conn_type: str, library: str, extra: str
) -> None:
    """A12"""
    assert [line for line in printed_without_library if line.startswith(f"{conn_type}: ")] == [
        f"{conn_type}: connections of type {conn_type} need {library}; install airflow-delay-provider[{extra}]"
    ]
