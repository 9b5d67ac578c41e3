"""RabbitMQ with TLS, with restricted users, and with wrong connections: all on real servers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pika
import pytest

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.errors import PermissionDeniedError
from airflow_delay_provider.brokers.rabbitmq.names import JOURNAL, UNROUTABLE
from airflow_delay_provider.domain.exceptions import BrokerError, UnknownChannelError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.rabbitmq import RabbitMQHook
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.testing.task_run import TaskRun
from tests.certificates import Authority
from tests.contract.journal import Tail
from tests.integration.rabbitmq_scene import Scene, wait_for
from tests.rabbits import (
    SECRET,
    config_of,
    connection_of,
    counted_looks,
    declare_queue,
    fresh_vhost,
    private_node,
    problems,
    user,
)
from tools.servers import process

INGRESS = r"^delay\.v1\..*\.ingress\..*"
RELAYS = r"^delay\.v1\..*\.relay\..*"
LADDER = r"^delay\.v1\..*"
PREPARED = ("orders", "orders.dead", "events:order.created")


on_each_version = pytest.mark.usefixtures("rabbitmq_version")


@pytest.fixture(scope="module")
def scene(rabbitmq_version: str) -> Iterator[Scene]:
    """A ladder that an administrator has created, with routes to three channels."""
    with fresh_vhost() as url, Scene(url) as opened:
        for name in ("orders", "orders.dead", "private"):
            opened.queue(name)
        with opened.amqp() as amqp:
            amqp.exchange_declare("events", "topic", durable=True)
            amqp.queue_bind(opened.queue("created"), "events", "order.created")
        opened.broker.create_topology(PREPARED)
        yield opened


@contextmanager
def broker_of(scene: Scene, **permissions: str) -> Iterator[RabbitMQBroker]:
    """A client of the scene's ladder as a new user with these permissions."""
    with user(scene.url, **permissions) as url, RabbitMQBroker(config_of(url, **scene.settings)) as broker:
        yield broker


# -- least privilege -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channel", "queue"), [("orders", "orders"), ("events:order.created", "created")])
@pytest.mark.parametrize("after", [0, 0.3])
def test_a_publisher_needs_to_write_to_the_entries_only(scene: Scene, channel: str, queue: str, after: float) -> None:
    message = scene.message(channel, after=after)
    with broker_of(scene, write=INGRESS) as broker:
        assert broker.check().endswith("is ready")
        broker.schedule([message])
    assert [arrival.message.id for arrival in scene.collect(queue, 1)] == [message.id]


def test_a_publisher_cannot_go_around_the_ladder(scene: Scene) -> None:
    topology = scene.topology
    with user(scene.url, write=INGRESS) as url:
        for exchange, key in (
            (topology.exit, topology.route("orders", 0)[1]),
            (topology.dispatch, topology.route("orders", 0)[1]),
            (topology.arrival, topology.route("orders", 0)[1]),
            ("", topology.relay("orders")),
            (topology.level(0), topology.route("orders", 100)[1]),
            (JOURNAL, ""),
            (topology.unrouted, ""),
            ("", "orders"),
            ("", topology.rung(100)),
        ):
            with pika.BlockingConnection(pika.URLParameters(url)) as connection:
                amqp = connection.channel()
                amqp.confirm_delivery()
                with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="ACCESS_REFUSED"):
                    amqp.basic_publish(exchange, key, b"x")
        with RabbitMQBroker(config_of(url, **scene.settings)) as broker:
            scene.broker.send([scene.message("orders", after=0)])
            wait_for(lambda: scene.count("orders"), what="a message that could be taken")
            with pytest.raises(PermissionDeniedError, match="lacks a permission"):
                broker.receive("orders")
            with counted_looks(), pytest.raises(PermissionDeniedError, match="lacks a permission"):
                broker.peek("orders")
            with pytest.raises(PermissionDeniedError, match="lacks a permission"):
                broker.journal_end()
            with pytest.raises(PermissionDeniedError, match="lacks a permission"):
                broker.delete_topology(even_if_messages_wait=True)
    scene.collect("orders", 1)


def test_a_channel_that_was_not_prepared_is_refused_or_its_message_is_parked(scene: Scene) -> None:
    """The user may write to these names, so that a broker of any version says whether they exist."""
    with broker_of(scene, write=rf"{INGRESS}|{RELAYS}|^nowhere$") as broker:
        with pytest.raises(UnknownChannelError, match="queue 'nowhere' does not exist"):
            broker.schedule([scene.message("nowhere", after=1)])
        with pytest.raises(PermissionDeniedError, match=r"lacks a permission .*(order.gone|'events')"):
            broker.schedule([scene.message("events:order.gone", after=1)])
        broker.schedule([scene.message("private", after=0)])
    require_parked(scene, 1)


@pytest.mark.parametrize("channel", ["nowhere", "events:order.gone", "missing:order.gone"])
def test_messages_for_a_channel_that_the_user_may_not_see_are_refused_or_parked_but_never_lost(
    scene: Scene, channel: str
) -> None:
    """RabbitMQ 4 does not tell users without permissions on a queue whether it exists."""
    with broker_of(scene, write=INGRESS) as broker:
        try:
            broker.schedule([scene.message(channel, after=0.1)])
        except (UnknownChannelError, PermissionDeniedError):
            return
    require_parked(scene, 1)


def require_parked(scene: Scene, count: int) -> None:
    """Wait until so many messages are seen where those go that have no route, and take them away."""
    problem = (
        f"{count} messages had no route and are parked in queue {UNROUTABLE}; create their channels again, then run"
        " `airflow delay topology replay-parked`"
    )
    wait_for(
        lambda: problems(scene.broker) == [problem],
        what=f"{count} parked messages",
    )
    with scene.amqp() as amqp:
        amqp.queue_purge(UNROUTABLE)


@on_each_version
def test_a_publisher_that_finds_no_ladder_says_what_is_missing() -> None:
    message = Message(channel="orders", payload=b"x", deliver_at=datetime.now(UTC) + timedelta(minutes=1))
    with fresh_vhost() as url, user(url, write=INGRESS) as restricted, RabbitMQBroker(config_of(restricted)) as broker:
        assert broker.check().endswith("is created with the first message")
        with pytest.raises(PermissionDeniedError, match=r"lacks a permission .*; grant it, see docs/rabbitmq.md"):
            broker.schedule([message])


def test_a_publisher_without_any_permission_gets_an_error_with_the_ids(scene: Scene) -> None:
    message = scene.message("orders", after=1)
    with broker_of(scene) as broker, pytest.raises(PermissionDeniedError, match="lacks a permission") as caught:
        broker.schedule([message])
    assert caught.value.unconfirmed == (message.id,)
    assert SECRET not in str(caught.value)


def test_a_consumer_needs_read_on_its_queue_and_write_on_ingress_exchanges_to_requeue(scene: Scene) -> None:
    with broker_of(scene, read="^orders$") as reader:
        scene.broker.send([scene.message("orders", after=0)])
        with counted_looks():
            wait_for(lambda: bool(reader.peek("orders")), what="a message to look at")
        (delivery,) = wait_for(lambda: reader.receive("orders"), what="the message")
        with pytest.raises(PermissionDeniedError, match="lacks a permission"):
            reader.requeue(delivery, timedelta(0))
        reader.release([delivery])
        scene.broker.send([scene.message("private", after=0)])
        with pytest.raises(PermissionDeniedError, match=r"lacks a permission .*'private'"):
            wait_for(lambda: bool(reader.receive("private")), what="a refusal")
    with broker_of(scene, read="^orders$", write=INGRESS) as consumer:
        (delivery,) = wait_for(lambda: consumer.receive("orders"), what="the message is back")
        consumer.requeue(delivery, timedelta(milliseconds=100))
        (again,) = wait_for(lambda: consumer.receive("orders"), what="the message comes again")
        assert again.message.handled_count == 1
        consumer.dead_letter(again, channel="orders.dead", reason="broken")
    (dead,) = scene.collect("orders.dead", 1)
    assert dead.message.id == delivery.message.id
    scene.collect("private", 1)


def test_a_waiter_needs_to_read_the_journal_only(scene: Scene) -> None:
    with broker_of(scene, read=r"^delay\.v1\.journal$") as waiter:
        tail, now = Tail(waiter), datetime.now(UTC)
        start = tail.position
        message = Message(channel="orders", payload=b"x", deliver_at=now + timedelta(seconds=0.2))
        scene.schedule_in_time([message], now=now)
        scene.collect("orders", 1)
        wait_for(lambda: message.id in waiter.find_outcomes([message.id], since=start), what="the outcome")

        def changes() -> list[Change]:
            tail.read()
            return [entry.change for entry in tail.of([message])]

        wait_for(lambda: changes() == [Change.SCHEDULED, Change.DISPATCHED], what="the whole story")
        with pytest.raises(PermissionDeniedError, match="lacks a permission"):
            waiter.schedule([message])


@on_each_version
def test_the_journal_of_a_new_ladder_can_be_read_before_anything_was_scheduled() -> None:
    """Readers begin at its last record, which a reader who may not write could not put there."""
    with fresh_vhost() as url, Scene(url) as scene, broker_of(scene, read=r"^delay\.v1\.journal$") as waiter:
        start = waiter.journal_end()
        assert waiter.read_journal(after=start) == []
        assert waiter.find_outcomes(["m1"], since=start) == {}


def test_an_administrator_of_the_ladder_needs_no_more_than_its_names_and_the_channels(rabbitmq_version: str) -> None:
    own = {"configure": LADDER, "read": LADDER, "write": rf"{LADDER}|^(orders|events)$"}
    with fresh_vhost() as url, user(url, **own) as restricted:
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            connection.channel().queue_declare("orders", durable=True)
            connection.channel().queue_declare("private", durable=True)
            connection.channel().exchange_declare("events", "topic", durable=True)
        with RabbitMQBroker(config_of(restricted, tick=60)) as broker:
            broker.create_topology(["orders", "events:order.created"])
            assert problems(broker) == []
            broker.check_channels(["orders"])
            broker.delete_topology(even_if_messages_wait=True)


def test_verifying_as_a_user_who_may_not_configure_says_what_was_not_checked(scene: Scene) -> None:
    with broker_of(scene) as broker:
        issues = broker.verify_topology()
        assert problems(broker) == []
    assert [issue for issue in issues if "were not checked, because user" in issue.text]


# -- connections that are wrong ------------------------------------------------------------------------------------


@pytest.fixture(params=["password", "vhost", "permission", "host"])
def wrong(
    request: pytest.FixtureRequest,
    rabbitmq_version: str,
) -> Iterator[tuple[dict[str, Any], str]]:
    """A connection that does not work, and its error message."""
    kind = request.param
    with fresh_vhost() as url, user(url) as restricted:
        connection = connection_of(restricted, connect_timeout=30)
        yield {
            "password": (
                connection | {"password": SECRET + "x"},
                r"the login of user 'user-\w+' is refused; correct login and password of the connection",
            ),
            "vhost": (
                connection | {"schema": "elsewhere"},
                r"user 'user-\w+' may not use vhost 'elsewhere', or it does not exist; correct the connection's vhost",
            ),
            "permission": (connection, r"user 'user-\w+' lacks a permission \(ACCESS_REFUSED.*\); grant it, see docs/"),
            "host": (
                connection | {"port": process.free_port()},
                r"cannot be reached or was lost \(Connection refused\); check that it runs, and host and port",
            ),
        }[kind]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may pass is tried once."""
    from airflow_delay_provider.brokers.rabbitmq import client

    monkeypatch.setattr(client, "CONNECT_ATTEMPTS", 1)


@pytest.mark.usefixtures("impatient")
def test_a_wrong_connection_fails_a_task_with_the_remedy_and_without_the_secret(
    wrong: tuple[dict[str, Any], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A12, A48"""
    connection, problem = wrong
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection))
    with caplog.at_level(logging.DEBUG), pytest.raises(BrokerError, match=problem) as caught:
        TaskRun(
            ScheduleMessageOperator(
                task_id="remind", channel="orders", payload="x", deliver_after=60, delay_conn_id="rabbit"
            )
        )
    assert SECRET not in f"{caught.value} {caught.value!r} {caplog.text}"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("hook_class", [DelayHook, RabbitMQHook])
def test_the_connection_form_shows_what_is_wrong(
    wrong: tuple[dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
    hook_class: Callable[..., DelayHook],
    rabbitmq_version: str,
) -> None:
    """A12: a user without permissions can connect, which is all that the form asks."""
    connection, problem = wrong
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection))
    hook = hook_class("rabbit")
    works, text = hook.test_connection()
    hook.close()
    if "lacks a permission" in problem:
        state = (
            "is created with" if rabbitmq_version == "rabbitmq3" else r"is not visible to user 'user-\w+', who has no"
        )
        assert works
        assert re.search(f"the ladder delay.v1.ladder.1000ms {state}", text)
    else:
        assert not works
        assert re.search(problem, text)
    assert SECRET not in text


@on_each_version
def test_a_connection_that_works_is_reported_with_the_server_and_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_vhost() as url:
        monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection_of(url)))
        hook = DelayHook("rabbit")
        works, text = hook.test_connection()
        hook.close()
    assert works
    assert "RabbitMQ 3." in text or "RabbitMQ 4." in text
    assert text.endswith("the ladder delay.v1.ladder.1000ms is created with the first message")


# -- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_port(
    rabbitmq_version: str,
    tmp_path_factory: pytest.TempPathFactory,
    authority: Authority,
) -> Iterator[tuple[int, int]]:
    """The TLS port and the plain port of a server that wants a certificate of every client."""
    port = process.free_port()
    certificate, key = authority.issue("rabbit.internal", server=True)
    settings = {
        "listeners.ssl.1": f"127.0.0.1:{port}",
        "ssl_options.cacertfile": str(authority.file),
        "ssl_options.certfile": str(certificate),
        "ssl_options.keyfile": str(key),
        "ssl_options.verify": "verify_peer",
        "ssl_options.fail_if_no_peer_cert": "true",
    }
    with private_node(tmp_path_factory.mktemp("tls"), settings) as node:
        yield port, node.port


def connect(port: int, **settings: Any) -> str:
    config = config_of(f"amqp://guest:guest@127.0.0.1:{port}/%2F", connect_timeout=30, tick=60, **settings)
    with RabbitMQBroker(config) as broker:
        return broker.check()


def files(certificate: Path, key: Path) -> dict[str, str]:
    return {"cert_file": str(certificate), "key_file": str(key)}


def test_a_connection_over_tls_schedules_and_receives(tls_port: tuple[int, int], authority: Authority) -> None:
    port, plain_port = tls_port
    settings = {"ca_file": str(authority.file), "server_name": "rabbit.internal", "tick": 0.1}
    settings |= files(*authority.issue("airflow"))
    with Scene(f"amqp://guest:guest@127.0.0.1:{port}/%2F", **settings) as scene:
        assert scene.broker.config.tls is not None
        declare_queue(f"amqp://guest:guest@127.0.0.1:{plain_port}/%2F", "orders")
        message = scene.message("orders", after=0.2)
        scene.broker.schedule([message])
        assert [arrival.message.id for arrival in scene.collect("orders", 1)] == [message.id]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("wrong_setting", "problem"),
    [
        ("another authority", "TLS failed .*correct ca_file, cert_file, key_file or server_name"),
        ("another name", "TLS failed .*rabbit.elsewhere.*correct ca_file, cert_file, key_file or server_name"),
        ("the host's name", "TLS failed .*correct ca_file, cert_file, key_file or server_name"),
        ("no authority", "TLS failed .*correct ca_file, cert_file, key_file or server_name"),
        ("the plain port", "TLS failed .*or use the port that speaks TLS"),
        ("a strange certificate", "closed the connection after TLS was set up; .*correct cert_file and key_file"),
        ("no certificate", "closed the connection after TLS was set up; .*correct cert_file and key_file"),
    ],
)
def test_tls_errors_are_explained(
    tls_port: tuple[int, int], authority: Authority, tmp_path: Path, wrong_setting: str, problem: str
) -> None:
    port, plain_port = tls_port
    other = Authority(tmp_path)
    settings: dict[str, Any] = {"ca_file": str(authority.file), "server_name": "rabbit.internal"}
    own = files(*authority.issue("airflow"))
    changed: dict[str, Any] = {
        "another authority": {"ca_file": str(other.file)},
        "another name": {"server_name": "rabbit.elsewhere"},
        "the host's name": {"server_name": None},
        "no authority": {"ca_file": None},
        "the plain port": {},
        "a strange certificate": files(*other.issue("airflow")),
        "no certificate": dict.fromkeys(own),
    }[wrong_setting]
    used_port = plain_port if wrong_setting == "the plain port" else port
    with pytest.raises(BrokerError, match=problem):
        connect(used_port, **settings | own | changed)


@pytest.mark.usefixtures("impatient")
def test_a_plain_connection_to_a_tls_port_is_refused_with_the_remedy(tls_port: tuple[int, int]) -> None:
    with pytest.raises(BrokerError, match=r"this port does not speak AMQP 0-9-1: correct port or ssl"):
        connect(tls_port[0])
