"""A dispatcher and the brokers it sends to: what is wrong with one message, channel or connection stays there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4

import httpx
import pika
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.ledger import listing, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import SystemClock, floor_ms
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.hooks.delay import open_destination
from tests.integration.file_secrets import FILE_VARIABLE, HANGS, FileSecrets
from tests.integration.test_dispatcher_process import Process, running
from tests.kafkas import connection_of as kafka_connection_of
from tests.kafkas import fresh_topic, require_kafka
from tests.rabbits import connection_of, declare_queue, fresh_vhost, manage, require_management
from tools.servers import component

#: For what should happen at once, on a busy machine.
PATIENCE_SECONDS = 60.0

wait_for = partial(component.wait_for, seconds=PATIENCE_SECONDS, interval=0.05)


class Connections:
    """The connections that the dispatcher finds; each change counts from then on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, Any] = {}
        self.define()

    def define(self, **connections: Mapping[str, Any]) -> None:
        self._known |= connections
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._known))
        new.rename(self._file)


@pytest.fixture
def connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connections:
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND", f"{FileSecrets.__module__}.{FileSecrets.__name__}")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "connections.json"))
    return Connections(tmp_path / "connections.json")


@pytest.fixture
def vhost() -> Iterator[str]:
    with fresh_vhost() as url:
        yield url


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[Ledger]:
    ledger = Ledger(postgres_url)
    yield ledger
    ledger.close()


def hold(ledger: Ledger, destination: str, channel: str, n: int, *, after: timedelta = timedelta(0)) -> list[str]:
    """Let messages wait in the ledger for another broker, as tasks have scheduled them while all was well."""
    now = SystemClock().now()
    messages = [Message(channel=channel, payload=b"p", deliver_at=now + after) for _ in range(n)]
    ledger.transact(
        lambda connection: scheduling.insert(
            connection, messages, destination=destination, on_conflict=OnConflict.FAIL, now_ms=floor_ms(now)
        )
    )
    return [message.id for message in messages]


def states(ledger: Ledger, destination: str) -> dict[State, int]:
    with ledger.read() as connection:
        return {state: n for state, n in listing.count_by_state(connection, destination=destination).items() if n}


def has_dispatched(ledger: Ledger, destination: str, n: int) -> bool:
    return states(ledger, destination) == {State.DISPATCHED: n}


def loop_of(process: Process, destination: str) -> dict[str, Any]:
    found: dict[str, Any] = process.health()[1]["loops"].get(f"dispatch_to_brokers:{destination}", {})
    return found


def count(url: str, queue: str) -> int:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        n: int = connection.channel().queue_declare(queue, passive=True).method.message_count
        return n


def test_messages_wait_while_the_connection_names_a_file_that_is_not_there(
    ledger: Ledger, vhost: str, connections: Connections, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A12, A25: a mistake in settings ends no message, and says so."""
    declare_queue(vhost, "orders")
    connections.define(mq=connection_of(vhost, ssl=True, ca_file=str(tmp_path / "no-such-ca.pem")))
    hold(ledger, "mq", "orders", 100)
    with running(tmp_path, "--ledger", str(ledger.url.render_as_string(hide_password=False))) as process:
        wait_for(lambda: loop_of(process, "mq").get("failures", 0) >= 2, what="two attempts")
        assert states(ledger, "mq") == {State.SCHEDULED: 100}
        status, report = process.health()
        assert (status, report["well"]) == (503, False)
        assert "ca_file" in loop_of(process, "mq")["error"]
        assert 'delay_errors_total{loop="dispatch_to_brokers:mq"}' in process.metrics()
        # Airflow, which was asked for the connection, logs to stdout.
        assert "dispatch_to_brokers:mq failed, next attempt in" in capfd.readouterr().out
        connections.define(mq=connection_of(vhost))
        wait_for(lambda: has_dispatched(ledger, "mq", 100), what="all messages once the connection is corrected")
        wait_for(lambda: process.health()[0] == 200, what="a dispatcher that is well")
    assert count(vhost, "orders") == 100


def test_ten_thousand_messages_for_a_missing_queue_hold_up_no_other_and_come_once_it_is_there(
    ledger: Ledger, vhost: str, connections: Connections, tmp_path: Path
) -> None:
    """A12, B36: the others of the same broker are due behind them."""
    declare_queue(vhost, "healthy")
    connections.define(mq=connection_of(vhost))
    hold(ledger, "mq", "missing", 10_000)
    with running(tmp_path, "--ledger", str(ledger.url.render_as_string(hide_password=False))) as process:
        wait_for(lambda: "missing" in loop_of(process, "mq").get("troubles", {}), what="the channel in /health")
        for n in range(5):
            hold(ledger, "mq", "healthy", 10, after=timedelta(seconds=n / 2))
        wait_for(lambda: states(ledger, "mq").get(State.DISPATCHED) == 50, what="the messages of the other channel")
        assert states(ledger, "mq") == {State.SCHEDULED: 10_000, State.DISPATCHED: 50}
        assert process.health()[0] == 503
        assert "does not exist" in loop_of(process, "mq")["troubles"]["missing"]
        assert 'delay_held_channels{loop="dispatch_to_brokers:mq"} 1.0' in process.metrics()
        declare_queue(vhost, "missing")
        wait_for(lambda: has_dispatched(ledger, "mq", 10_050), what="all messages, the queue is there", seconds=120)
        wait_for(lambda: process.health()[0] == 200, what="a dispatcher that is well")
    assert count(vhost, "missing") == 10_000


def test_a_connection_that_is_undefined_or_cannot_be_looked_up_holds_up_no_other(
    ledger: Ledger, vhost: str, connections: Connections, tmp_path: Path
) -> None:
    """B36: each destination is served by itself, and found as soon as it is defined."""
    declare_queue(vhost, "orders")
    connections.define(mq=connection_of(vhost))
    for destination, n in (("a_undefined", 3), (HANGS, 3), ("mq", 50)):
        hold(ledger, destination, "orders", n)
    with running(tmp_path, "--ledger", str(ledger.url.render_as_string(hide_password=False))) as process:
        wait_for(lambda: has_dispatched(ledger, "mq", 50), what="the messages of the connection that is defined")
        wait_for(lambda: "is not defined" in (loop_of(process, "a_undefined").get("error") or ""), what="the error")
        assert loop_of(process, "mq")["well"] is True
        assert process.health()[0] == 503
        assert states(ledger, "a_undefined") == {State.SCHEDULED: 3}
        connections.define(a_undefined=connection_of(vhost))
        wait_for(lambda: has_dispatched(ledger, "a_undefined", 3), what="the messages once it is defined")


@contextmanager
def dispatching(ledger: Ledger, **config: Any) -> Iterator[Dispatcher]:
    """A dispatcher in this process, where waits can be made short."""
    dispatcher = Dispatcher(
        Ledger(ledger.url), open_broker=open_destination, config=DispatcherConfig(health_port=None, **config)
    )
    dispatcher.start()
    try:
        yield dispatcher
    finally:
        dispatcher.stop()


def test_a_rotated_password_is_picked_up_without_a_restart(
    ledger: Ledger, vhost: str, connections: Connections
) -> None:
    """A12, B36"""
    declare_queue(vhost, "orders")
    name, parts = f"user-{uuid4().hex[:12]}", urlsplit(vhost)
    everything = {"configure": ".*", "write": ".*", "read": ".*"}

    def give(password: str) -> dict[str, Any]:
        manage("PUT", f"users/{name}", {"password": password, "tags": ""})
        manage("PUT", f"permissions/{parts.path[1:]}/{name}", everything)
        return connection_of(vhost) | {"login": name, "password": password}

    connections.define(mq=give("first"))
    try:
        with dispatching(ledger) as dispatcher:
            hold(ledger, "mq", "orders", 5)
            wait_for(lambda: has_dispatched(ledger, "mq", 5), what="messages with the first password")
            rotated = give("second")
            for each in httpx.get(f"{require_management()}/api/connections").raise_for_status().json():
                if each["user"] == name:
                    manage("DELETE", f"connections/{quote(each['name'])}")
            hold(ledger, "mq", "orders", 5)
            wait_for(
                lambda: "is refused" in str(dispatcher.health()["loops"]["dispatch_to_brokers:mq"]["error"]),
                what="the refusal of the old password",
            )
            connections.define(mq=rotated)
            wait_for(lambda: has_dispatched(ledger, "mq", 10), what="messages with the second password")
    finally:
        manage("DELETE", f"users/{name}")


def test_a_connection_that_names_another_broker_is_followed_while_the_old_one_still_works(
    ledger: Ledger, vhost: str, connections: Connections
) -> None:
    """B36"""
    declare_queue(vhost, "orders")
    connections.define(mq=connection_of(vhost))
    with fresh_vhost() as other, dispatching(ledger, reread_interval=timedelta(milliseconds=200)) as dispatcher:
        declare_queue(other, "orders")
        hold(ledger, "mq", "orders", 1)
        wait_for(lambda: count(vhost, "orders") == 1, what="a message at the first broker")
        connections.define(mq=connection_of(other))

        def arrives_there() -> bool:
            hold(ledger, "mq", "orders", 1)
            return count(other, "orders") > 0

        wait_for(arrives_there, what="a message at the broker that the connection names now")
        assert dispatcher.health()["loops"]["dispatch_to_brokers:mq"]["well"]


def test_a_destination_that_no_message_waits_for_is_closed_and_opened_again_when_one_does(
    ledger: Ledger, vhost: str, connections: Connections
) -> None:
    """B36"""
    declare_queue(vhost, "orders")
    connections.define(mq=connection_of(vhost))
    with dispatching(ledger, idle_close=timedelta(milliseconds=100)) as dispatcher:
        for n in (1, 2):
            hold(ledger, "mq", "orders", 1)
            wait_for(lambda n=n: has_dispatched(ledger, "mq", n), what="the message")
            wait_for(lambda: "dispatch_to_brokers:mq" not in dispatcher.health()["loops"], what="the loop to end")


def test_messages_for_kafka_wait_until_the_connection_and_the_topic_are_repaired(
    ledger: Ledger, connections: Connections
) -> None:
    """A12, A25, E11: neither partitions that disagree nor a topic that forgets at once ends a message."""
    bootstrap, name = require_kafka(), f"held-{uuid4().hex[:8]}"
    good, forgetful = fresh_topic(bootstrap), fresh_topic(bootstrap, retention_ms=1000)
    with KafkaBroker(KafkaConfig.from_settings({"ladder": name, "partitions": 2}, host=bootstrap)) as broker:
        broker.create_topology()
        connections.define(log=kafka_connection_of(bootstrap, ladder=name, partitions=3))
        hold(ledger, "log", good, 5)
        hold(ledger, "log", forgetful, 5)
        with dispatching(ledger) as dispatcher:

            def loop() -> dict[str, Any]:
                found: dict[str, Any] = dispatcher.health()["loops"].get("dispatch_to_brokers:log", {})
                return found

            wait_for(lambda: "partitions" in str(loop().get("error")), what="the mistake in /health")
            assert states(ledger, "log") == {State.SCHEDULED: 10}
            connections.define(log=kafka_connection_of(bootstrap, ladder=name, partitions=2))
            wait_for(lambda: states(ledger, "log").get(State.DISPATCHED) == 5, what="the messages of the good topic")
            wait_for(lambda: "retention.ms" in loop().get("troubles", {}).get(forgetful, ""), what="the bad topic")
            assert states(ledger, "log") == {State.SCHEDULED: 5, State.DISPATCHED: 5}
            set_retention(bootstrap, forgetful, 600_000)
            wait_for(lambda: has_dispatched(ledger, "log", 10), what="all messages once the topic keeps them")
            wait_for(lambda: dispatcher.health()["well"], what="a dispatcher that is well")
        broker.delete_topology(even_if_messages_wait=True)


def set_retention(bootstrap: str, topic: str, milliseconds: int) -> None:
    entry = ConfigEntry("retention.ms", str(milliseconds), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        admin.incremental_alter_configs([resource])[resource].result(60)
