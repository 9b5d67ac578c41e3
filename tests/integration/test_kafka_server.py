"""The private Kafka brokers that other tests rely on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType

from tests.certificates import Authority
from tests.kafkas import (
    USERS,
    client_of,
    fresh_topic,
    grant,
    private_broker,
    private_cluster,
    produce,
    read_all,
    require_kafka,
    secured_broker,
)
from tools.servers.cache import CannotFillError, cached
from tools.servers.component import wait_for
from tools.servers.kafka import Kafka

# Brokers of a test's own take their time to start on a busy machine.
pytestmark = pytest.mark.timeout(600)

TEN = [b"%d" % each for each in range(10)]


def values_in(bootstrap: str, topic: str, n: int, **arguments: Any) -> list[bytes]:
    return [message.value() or b"" for message in read_all(bootstrap, topic, n, **arguments)]


def test_the_given_broker_writes_and_reads() -> None:
    bootstrap = require_kafka()
    topic = fresh_topic(bootstrap, partitions=3, retention_ms=60_000)
    written = produce(bootstrap, topic, TEN)
    assert len(written) == len(TEN)
    assert sorted(values_in(bootstrap, topic, len(TEN))) == TEN


def test_the_given_broker_has_transactions_that_are_seen_once_they_are_committed() -> None:
    bootstrap = require_kafka()
    topic = fresh_topic(bootstrap)
    with Producer({"bootstrap.servers": bootstrap, "transactional.id": topic}) as producer:
        producer.init_transactions(30)
        for value, end in ((b"aborted", producer.abort_transaction), (b"committed", producer.commit_transaction)):
            producer.begin_transaction()
            producer.produce(topic, value)
            producer.flush(30)
            end(30)
    assert values_in(bootstrap, topic, 1) == [b"committed"]
    assert values_in(bootstrap, topic, 2, isolation="read_uncommitted") == [b"aborted", b"committed"]


def test_a_broker_killed_with_minus_nine_comes_back_with_its_data_and_ends_without_a_trace(tmp_path: Path) -> None:
    with private_broker(tmp_path) as broker:
        topic = fresh_topic(broker.bootstrap)
        produce(broker.bootstrap, topic, TEN)
        [killed] = broker.pids
        broker.kill()
        assert not psutil.pid_exists(killed)
        broker.start_again()
        assert values_in(broker.bootstrap, topic, len(TEN)) == TEN
        [running] = broker.pids
    assert not psutil.pid_exists(running)
    assert [path.name for path in tmp_path.rglob("*")] == ["logs", "kafka.log"]


def test_a_cluster_survives_the_loss_of_one_node_and_takes_it_back(tmp_path: Path) -> None:
    with private_cluster(tmp_path) as cluster:
        topic = fresh_topic(cluster.bootstrap, partitions=3)
        assert needed_copies(cluster.bootstrap, topic) == "2"
        cluster.kill(2)
        assert len(cluster.pids) == 2
        produce(cluster.bootstrap, topic, TEN)
        assert sorted(values_in(cluster.bootstrap, topic, len(TEN))) == TEN
        cluster.start_again(2)
        assert len(cluster.pids) == 3


def needed_copies(bootstrap: str, topic: str) -> str:
    which = ConfigResource(ConfigResource.Type.TOPIC, topic)
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        return admin.describe_configs([which])[which].result(60)["min.insync.replicas"].value or ""


# -- a secured broker ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Kafka]:
    with secured_broker(tmp_path_factory.mktemp("secured"), authority) as broker:
        yield broker


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_user_may_do_what_was_granted_and_nothing_else(secured: Kafka, authority: Authority, mechanism: str) -> None:
    topic, bootstrap = fresh_topic(secured.bootstrap), secured.bootstrap_of("SASL_SSL")
    app, admin = client_of("app", authority, mechanism), client_of("admin", authority, mechanism)
    with pytest.raises(KafkaException) as refused:
        produce(bootstrap, topic, TEN, settings=app)
    assert refused.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    grant(secured, "app", ResourceType.TOPIC, topic, AclOperation.WRITE)
    produce(bootstrap, topic, TEN, settings=app)
    assert values_in(bootstrap, topic, len(TEN), settings=admin) == TEN


def test_a_certificate_is_the_user_of_its_name(secured: Kafka, authority: Authority) -> None:
    topic, (certificate, key) = fresh_topic(secured.bootstrap), authority.issue("app")
    settings = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(authority.file),
        "ssl.certificate.location": str(certificate),
        "ssl.key.location": str(key),
    }
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        produce(secured.bootstrap_of("SSL"), topic, TEN, settings=settings)
    grant(secured, "app", ResourceType.TOPIC, topic, AclOperation.WRITE)
    produce(secured.bootstrap_of("SSL"), topic, TEN, settings=settings)
    assert values_in(secured.bootstrap, topic, len(TEN)) == TEN


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("password", "Authentication failed"),
        ("authority", "certificate verify failed"),
        ("name", "certificate verify failed"),
        ("no certificate", "bad certificate|certificate required"),
    ],
)
def test_a_failed_authentication_is_refused(
    secured: Kafka, authority: Authority, wrong: str, problem: str, tmp_path: Path
) -> None:
    sasl, ssl = secured.bootstrap_of("SASL_SSL"), secured.bootstrap_of("SSL")
    app, ca = client_of("app", authority), str(authority.file)
    bootstrap, settings = {
        "password": (sasl, app | {"sasl.password": USERS["admin"]}),
        "authority": (sasl, app | {"ssl.ca.location": str(Authority(tmp_path).file)}),
        "name": (sasl.replace("localhost", "127.0.0.1"), app),
        "no certificate": (ssl, {"security.protocol": "SSL", "ssl.ca.location": ca}),
    }[wrong]
    errors: list[str] = []
    client_settings: dict[str, Any] = {"bootstrap.servers": bootstrap, **settings, "log_level": 0}
    with AdminClient({**client_settings, "error_cb": lambda error: errors.append(error.str())}) as client:
        wait_for(
            lambda: client.poll(0.1) >= 0 and errors, what="the client reports an error", seconds=60, interval=0.01
        )
    assert re.search(problem, errors[0])


# -- the cache of jars ---------------------------------------------------------------------------------------------


def test_a_folder_of_the_cache_is_complete_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fills: list[Path] = []

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise CannotFillError("no network")

    def fill(folder: Path) -> None:
        fills.append(folder)
        (folder / "jar").touch()

    with pytest.raises(CannotFillError, match="no network"):
        cached("kafka-0", fail)
    assert not (tmp_path / "airflow-delay-provider" / "kafka-0").exists()
    for _ in range(2):
        folder = cached("kafka-0", fill)
    assert [path.name for path in folder.iterdir()] == ["jar"]
    assert len(fills) == 1
