from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig, TlsConfig
from airflow_delay_provider.domain.exceptions import ConfigurationError

SECRET = "s3cret-passw0rd"


def config(settings: dict[str, Any] | None = None, **fields: Any) -> RabbitMQConfig:
    return RabbitMQConfig.from_settings(settings or {}, **fields)


def test_an_empty_connection_is_the_broker_of_this_machine() -> None:
    """A21"""
    assert config() == RabbitMQConfig()
    given = config()
    assert (given.hosts, given.vhost, given.login, given.tls) == ((("localhost", 5672),), "/", "guest", None)
    topology = given.topology
    assert (topology.tick_ms, topology.journal) == (1000, True)
    assert (topology.journal_max_age, topology.max_length) == ("7D", None)


def test_empty_fields_of_a_form_are_fields_that_are_not_given() -> None:
    """A21"""
    names = (
        "heartbeat",
        "connect_timeout",
        "confirm_timeout",
        "ssl",
        "ca_file",
        "cert_file",
        "key_file",
        "server_name",
    )
    names += ("prefix", "tick", "max_length", "journal", "journal_max_age", "management_url")
    assert config(dict.fromkeys(names, ""), host="", vhost="", login="", password="") == config()
    assert config(dict.fromkeys(names)) == config()


@pytest.mark.parametrize(
    ("host", "port", "hosts"),
    [
        (None, 5673, (("localhost", 5673),)),
        ("a", None, (("a", 5672),)),
        ("a, b:5674 ,c", 5673, (("a", 5673), ("b", 5674), ("c", 5673))),
        ("::1", 5673, (("::1", 5673),)),
    ],
)
def test_several_hosts_are_tried_in_turn(
    host: str | None, port: int | None, hosts: tuple[tuple[str, int], ...]
) -> None:
    given = config(host=host, port=port, vhost="delay/eu", login="me", password=SECRET)
    assert given.hosts == hosts
    assert [(each.host, each.port) for each in given.parameters()] == list(hosts)
    assert {each.virtual_host for each in given.parameters()} == {"delay/eu"}
    assert {each.credentials.username for each in given.parameters()} == {"me"}


@pytest.mark.parametrize(("host", "port"), [("a,,b", 1), ("a:x", 1), (":5672", 1), ("a:70000", 1), ("a", 70_000)])
def test_hosts_that_are_none_are_refused(host: str, port: int) -> None:
    with pytest.raises(ConfigurationError, match=r"host: .* is not a list of hosts; use 'a,b:5673'"):
        config(host=host, port=port)


def test_settings_are_read_as_text_and_as_values() -> None:
    for settings in (
        {
            "heartbeat": 30,
            "connect_timeout": 2.5,
            "confirm_timeout": 5,
            "tick": 0.1,
            "max_length": 10,
            "journal": False,
        },
        {"heartbeat": "30", "connect_timeout": "2.5", "confirm_timeout": "5", "tick": "0.1", "max_length": "10"}
        | {"journal": "no"},
    ):
        given = config({**settings, "journal_max_age": "12h"})
        assert (given.heartbeat_seconds, given.connect_seconds, given.confirm_seconds) == (30, 2.5, 5.0)
        assert (given.topology.tick_ms, given.topology.max_length, given.topology.journal) == (100, 10, False)
        assert given.topology.journal_max_age == "12h"
        (parameters,) = given.parameters()
        assert (parameters.heartbeat, parameters.socket_timeout, parameters.blocked_connection_timeout) == (30, 2.5, 5)
    assert config({"prefix": "shop"}).topology.root == "shop.v1"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"heartbeat": "often"}, r"heartbeat: 'often' is not a number from 0 to 65535; correct the connection's extra"),
        ({"heartbeat": 70_000}, r"heartbeat: 70000 is not a number from 0 to 65535"),
        ({"heartbeat": "nan"}, r"heartbeat: 'nan' is not a number"),
        ({"connect_timeout": 0}, r"connect_timeout: 0 is not a number from 0.001 to 1000000000"),
        ({"confirm_timeout": -1}, r"confirm_timeout: -1 is not a number from 0.001"),
        ({"tick": "fast"}, r"tick: 'fast' is not a number"),
        ({"tick": 0.0001}, r"tick: 0 ms is not a tick; use 0.001 to 3600 seconds"),
        ({"tick": 3601}, r"tick: 3601000 ms is not a tick"),
        ({"prefix": "shop.v1"}, r"prefix: 'shop.v1' is not a prefix of names; use up to 40 letters"),
        ({"prefix": 7.5}, r"prefix: '7.5' is not a prefix of names"),
        ({"max_length": 0}, r"max_length: 0 is not a number from 1"),
        ({"max_length": [1]}, r"max_length: \[1\] is not a number from 1"),
        ({"journal": "perhaps"}, r"journal: 'perhaps' is neither true nor false; correct the connection's extra"),
        ({"ssl": 2}, r"ssl: 2 is neither true nor false"),
        ({"journal_max_age": "7"}, r"journal_max_age: '7' is not an age; use for example 7D, 12h or 30m"),
        ({"journal_max_age": 7}, r"journal_max_age: 7 is not an age"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name_and_the_remedy(settings: dict[str, Any], problem: str) -> None:
    """A12"""
    with pytest.raises(ConfigurationError, match=problem):
        config(settings)


# -- TLS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "tls", "port"),
    [
        ({}, None, 5672),
        ({"ssl": "true"}, TlsConfig(), 5671),
        ({"ca_file": "ca.pem"}, TlsConfig(ca_file="ca.pem"), 5671),
        ({"server_name": "mq"}, TlsConfig(server_name="mq"), 5671),
        ({"ca_file": "ca.pem", "ssl": False}, TlsConfig(ca_file="ca.pem"), 5671),
        (
            {"ca_file": "a", "cert_file": "b", "key_file": "c"},
            TlsConfig(ca_file="a", cert_file="b", key_file="c"),
            5671,
        ),
    ],
)
def test_files_for_tls_switch_it_on(settings: dict[str, Any], tls: TlsConfig | None, port: int) -> None:
    given = config(settings)
    assert (given.tls, given.hosts) == (tls, (("localhost", port),))


def test_servers_are_always_verified() -> None:
    import ssl

    context = TlsConfig().context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    (parameters,) = config({"ssl": True, "server_name": "mq.internal"}, host="10.0.0.1").parameters()
    assert parameters.ssl_options.server_hostname == "mq.internal"
    (parameters,) = config({"ssl": True}, host="10.0.0.1").parameters()
    assert parameters.ssl_options.server_hostname == "10.0.0.1"


@pytest.mark.parametrize("name", ["ca_file", "cert_file"])
@pytest.mark.parametrize("content", [None, "no certificate", 5])
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, name: str, content: object) -> None:
    file: Any = tmp_path / "file.pem"
    if isinstance(content, str):
        file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"ca_file, cert_file, key_file: cannot be used \(.*PEM files"):
        config({name: 5 if content == 5 else str(file)}).parameters()


# -- secrets -------------------------------------------------------------------------------------------------------


def test_secrets_are_shown_nowhere() -> None:
    given = config(
        {"management_url": f"http://me:{SECRET}@mq:15672"}, host="mq", vhost="delay", login="me", password=SECRET
    )
    assert given.password == SECRET
    assert SECRET not in f"{given!r} {given} {given.name} {given.parameters()!r}"
    assert given.name == "RabbitMQ at mq:5672, vhost 'delay'"


def test_a_login_without_a_password_does_not_get_the_one_of_guest() -> None:
    assert config(login="me").password == ""
