from __future__ import annotations

from typing import Any

import pytest

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.connection_forms import CONNECTION_TYPES
from airflow_delay_provider.domain.exceptions import ConfigurationError

SECRET = "s3cret-passw0rd"
[FORM] = [each for each in CONNECTION_TYPES if each["connection-type"] == "delay_kafka"]


def config(settings: dict[str, Any] | None = None, *, host: str | None = "kafka", **fields: Any) -> KafkaConfig:
    return KafkaConfig.from_settings(settings or {}, host=host, **fields)


def test_a_host_is_all_that_must_be_given() -> None:
    """A21"""
    given = config()
    assert given == KafkaConfig(client={"bootstrap.servers": "kafka:9092"})
    assert (given.topology, given.consumer_group, given.confirm_seconds) == (Topology(), "airflow-delay", 30.0)
    assert (given.topology.partitions, given.topology.radix, given.topology.replication_factor) == (4, 4, None)
    assert given.topology.journal_retention_ms == 7 * 86_400_000


@pytest.mark.parametrize("empty", [None, ""])
def test_empty_fields_of_a_form_are_fields_that_are_not_given(empty: str | None) -> None:
    """A21: a form stores all of its fields, the untouched ones with nothing in them."""
    assert config(dict.fromkeys(FORM["conn-fields"], empty), login=empty, password=empty) == config()


@pytest.mark.parametrize("settings", [{}, {"bootstrap.servers": ""}, {"bootstrap.servers": None}])
def test_a_connection_that_leads_nowhere_is_refused(settings: dict[str, Any]) -> None:
    """A12"""
    for host in (None, ""):
        with pytest.raises(ConfigurationError, match=r"bootstrap.servers: is not given; set the connection's host, or"):
            config(settings, host=host)


@pytest.mark.parametrize(
    ("host", "port", "servers"),
    [
        ("a", None, "a:9092"),
        ("a", 9094, "a:9094"),
        ("a:9093", 9094, "a:9093"),
        ("a, b:9094 ,10.0.0.1", 9093, "a:9093,b:9094,10.0.0.1:9093"),
        ("[::1],[fe80::2]:9094", None, "[::1]:9092,[fe80::2]:9094"),
        ("SSL://a:9093,b", None, "SSL://a:9093,b:9092"),
    ],
)
def test_several_hosts_may_have_ports_of_their_own(host: str, port: int | None, servers: str) -> None:
    given = config(host=host, port=port)
    assert given.client["bootstrap.servers"] == servers
    assert given.name == f"Kafka at {servers}"


@pytest.mark.parametrize(
    ("host", "port"),
    [("a,,b", None), (",", None), ("a:x", None), (":9092", None), ("a:70000", None), ("a", 70_000), ("::1", None)],
)
def test_hosts_that_are_none_are_refused(host: str, port: int | None) -> None:
    """A12"""
    with pytest.raises(ConfigurationError, match=r"host: .* is not a list of hosts; use 'a,b:9093'"):
        config(host=host, port=port)


def test_the_host_goes_before_the_extra() -> None:
    assert config({"bootstrap.servers": "old:1"}, host="new").client["bootstrap.servers"] == "new:9092"


# -- the client library's own settings -------------------------------------------------------------------------------


def test_a_connection_of_the_official_provider_is_understood() -> None:
    """A22: what it says of delivery is for its own consumers and producers."""
    extra = {
        "bootstrap.servers": "kafka:9092",
        "group.id": "billing",
        "security.protocol": "SSL",
        "ssl.ca.location": "/ca.pem",
        "client.id": "airflow",
        "auto.offset.reset": "latest",
        "enable.auto.commit": True,
        "enable.idempotence": False,
        "acks": 0,
        "request.required.acks": 0,
        "isolation.level": "read_uncommitted",
        "transactional.id": "mine",
    }
    given = config(extra, host=None)
    assert given.client == {
        name: extra[name] for name in ("bootstrap.servers", "security.protocol", "ssl.ca.location", "client.id")
    }
    assert given.consumer_group == "billing"
    assert config(extra | {"consumer_group": "mine"}).consumer_group == "mine"


@pytest.mark.parametrize(
    ("settings", "mechanism", "protocol"),
    [
        ({}, "PLAIN", "SASL_SSL"),
        ({"sasl.mechanism": "", "security.protocol": None}, "PLAIN", "SASL_SSL"),
        ({"sasl.mechanism": "SCRAM-SHA-512"}, "SCRAM-SHA-512", "SASL_SSL"),
        ({"security.protocol": "SASL_PLAINTEXT"}, "PLAIN", "SASL_PLAINTEXT"),
        ({"security.protocol": "sasl_ssl"}, "PLAIN", "sasl_ssl"),
    ],
)
def test_a_login_means_sasl_and_goes_over_tls_unless_that_is_asked_for(
    settings: dict[str, Any], mechanism: str, protocol: str
) -> None:
    given = config(settings, login="me", password=SECRET)
    assert given.client == {
        "bootstrap.servers": "kafka:9092",
        "sasl.username": "me",
        "sasl.password": SECRET,
        "sasl.mechanism": mechanism,
        "security.protocol": protocol,
    }
    assert given.user == "me"


def test_the_other_name_of_the_mechanism_is_not_overruled() -> None:
    """With both names given, the last one would win, and the password would be sent as it is."""
    given = config({"sasl.mechanisms": "SCRAM-SHA-256"}, login="me", password=SECRET)
    assert given.client["sasl.mechanisms"] == "SCRAM-SHA-256"
    assert "sasl.mechanism" not in given.client


@pytest.mark.parametrize("protocol", ["SSL", "plaintext"])
def test_a_login_that_would_not_be_sent_is_refused(protocol: str) -> None:
    """A12"""
    problem = rf"security.protocol: '{protocol}' sends no login; use SASL_SSL, or leave the login empty"
    with pytest.raises(ConfigurationError, match=problem):
        config({"security.protocol": protocol}, login="me", password=SECRET)


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location"])
def test_files_for_tls_switch_it_on(name: str) -> None:
    assert config({name: "/file.pem"}).client["security.protocol"] == "SSL"
    assert config({name: "/file.pem", "security.protocol": ""}).client["security.protocol"] == "SSL"
    assert config({name: "/file.pem", "security.protocol": "PLAINTEXT"}).client["security.protocol"] == "PLAINTEXT"
    assert config({name: "/file.pem"}, login="me").client["security.protocol"] == "SASL_SSL"


def test_without_a_login_no_security_setting_is_added() -> None:
    given = config({"sasl.username": "in-extra"})
    assert given.client.keys() == {"bootstrap.servers", "sasl.username"}
    assert (given.user, config().user) == ("in-extra", "without a login")


# -- our own settings ------------------------------------------------------------------------------------------------


def test_settings_are_read_as_text_and_as_values() -> None:
    values = {"partitions": 2, "replication_factor": 3, "radix": 16, "journal_days": 0.5, "confirm_timeout": 2.5}
    for settings in (values, {name: str(value) for name, value in values.items()}):
        given = config({**settings, "ladder": "billing.eu", "consumer_group": "mine"})
        assert given.topology == Topology(
            name="billing.eu", partitions=2, replication_factor=3, radix=16, journal_retention_ms=43_200_000
        )
        assert (given.confirm_seconds, given.consumer_group) == (2.5, "mine")
        assert given.client == {"bootstrap.servers": "kafka:9092"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"partitions": "many"}, r"partitions: 'many' is not a number from 1 to 1000; correct the connection's extra"),
        ({"partitions": 0}, r"partitions: 0 is not a number from 1 to 1000"),
        ({"partitions": 1001}, r"partitions: 1001 is not a number"),
        ({"partitions": [4]}, r"partitions: \[4\] is not a number"),
        ({"replication_factor": 0}, r"replication_factor: 0 is not a number from 1 to 100"),
        ({"radix": 1}, r"radix: 1 is not a radix of a ladder; use 2 to 64"),
        ({"radix": 65}, r"radix: 65 is not a number from 1 to 64"),
        ({"journal_days": 0}, r"journal_days: 0 is not a number from 0.001"),
        ({"journal_days": "nan"}, r"journal_days: 'nan' is not a number"),
        ({"confirm_timeout": -1}, r"confirm_timeout: -1 is not a number from 0.001"),
        ({"ladder": "my ladder"}, r"ladder: 'my ladder' is not a name; use letters, digits, '.', '_' and '-'"),
        ({"ladder": "a..b"}, r"ladder: 'a..b' is not a name"),
        ({"ladder": "x" * 101}, r"ladder: 'x+' is not a name"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name_and_the_remedy(settings: dict[str, Any], problem: str) -> None:
    """A12"""
    with pytest.raises(ConfigurationError, match=problem):
        config(settings)


# -- secrets -------------------------------------------------------------------------------------------------------


def test_secrets_are_shown_nowhere() -> None:
    given = config({"ssl.key.password": SECRET}, login="me", password=SECRET)
    assert given.client["sasl.password"] == SECRET
    assert SECRET not in f"{given!r} {given} {given.name} {given.user}"
    assert given.name == "Kafka at kafka:9092"


def test_a_login_without_a_password_sends_an_empty_one() -> None:
    assert config(login="me").client["sasl.password"] == ""
