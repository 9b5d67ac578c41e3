"""Kafka with TLS, with restricted users, and with wrong connections: all on real servers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka.admin import AclOperation, ResourcePatternType, ResourceType

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch import assignment
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, UnknownChannelError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.testing.task_run import TaskRun
from tests.certificates import Authority
from tests.integration.test_kafka_faults import Scene, headers_of, id_of, ids_of, journal_of
from tests.kafkas import USERS, dispatching, grant, secured_broker
from tools.servers import component, process
from tools.servers.kafka import Kafka

# Brokers of a test's own take their time to start on a busy machine.
pytestmark = pytest.mark.timeout(600)

READ, WRITE, DESCRIBE, DELETE = AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE, AclOperation.DELETE
CREATE, DESCRIBE_CONFIGS = AclOperation.CREATE, AclOperation.DESCRIBE_CONFIGS
TOPIC, GROUP, TRANSACTIONAL_ID = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID
LITERAL, PREFIXED = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
#: No consumer joins it: the library looks for the coordinator of its group even with assigned partitions.
READERS = "airflow-delay.reader"

wait_for = partial(component.wait_for, seconds=90, interval=0.05)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Kafka]:
    with secured_broker(tmp_path_factory.mktemp("secured"), authority) as broker:
        yield broker


@pytest.fixture(scope="module")
def served(secured: Kafka) -> Iterator[Scene]:
    """A ladder that an administrator has created and serves."""
    with Scene(secured.bootstrap) as opened, opened.dispatching():
        yield opened


@pytest.fixture
def scene(secured: Kafka) -> Iterator[Scene]:
    """A ladder that an administrator has made."""
    with Scene(secured.bootstrap) as opened:
        yield opened


class User:
    """A user with a certificate and no permissions."""

    def __init__(self, secured: Kafka, authority: Authority) -> None:
        self.name = f"user-{uuid4().hex[:12]}"
        self._secured = secured
        certificate, key = authority.issue(self.name)
        self.settings = {
            "ssl.ca.location": str(authority.file),
            "ssl.certificate.location": str(certificate),
            "ssl.key.location": str(key),
        }

    def may(
        self,
        kind: ResourceType,
        name: str,
        *operations: AclOperation,
        pattern: ResourcePatternType = ResourcePatternType.LITERAL,
    ) -> None:
        grant(self._secured, self.name, kind, name, *operations, pattern=pattern)

    @contextmanager
    def client_of(self, scene: Scene, **more: Any) -> Iterator[KafkaBroker]:
        settings = scene.settings | {"security.protocol": "SSL"} | self.settings | more
        with KafkaBroker(KafkaConfig.from_settings(settings, host=self._secured.bootstrap_of("SSL"))) as broker:
            yield broker


@pytest.fixture
def user(secured: Kafka, authority: Authority) -> User:
    return User(secured, authority)


def may_schedule(user: User, scene: Scene, *channels: str) -> None:
    topology = scene.topology
    user.may(TOPIC, topology.inbox, WRITE)
    user.may(TOPIC, topology.control, DESCRIBE)
    user.may(TOPIC, topology.journal, DESCRIBE)
    for channel in channels:
        user.may(TOPIC, channel, DESCRIBE)


def may_dispatch(user: User, scene: Scene, *channels: str) -> None:
    prefix = f"{scene.topology.prefix}."
    user.may(TOPIC, prefix, READ, WRITE, DELETE, pattern=PREFIXED)
    user.may(GROUP, scene.topology.dispatch_group, READ)
    user.may(GROUP, READERS, DESCRIBE)
    user.may(TRANSACTIONAL_ID, prefix, WRITE, pattern=PREFIXED)
    for channel in channels:
        user.may(TOPIC, channel, WRITE)


# -- least privilege -----------------------------------------------------------------------------------------------


def test_scheduling_needs_write_on_the_inbox_and_describe_on_the_rest(served: Scene, user: User) -> None:
    channel = served.channel()
    may_schedule(user, served, channel)
    with user.client_of(served) as client:
        assert client.check().endswith("is ready")
        client.check_channels([channel])
        # Not so soon that a slow machine makes it due: then it would be sent at once, which this user may not.
        message = served.message(channel, after=5)
        client.schedule([message])
    assert ids_of(served.arrived(channel, 1)) == [message.id]


def test_sending_at_once_needs_write_on_the_channel_and_the_journal(served: Scene, user: User) -> None:
    channel = served.channel()
    may_schedule(user, served, channel)
    user.may(TOPIC, channel, WRITE)
    with user.client_of(served) as client, pytest.raises(BrokerError, match="lacks a permission"):
        client.schedule([served.message(channel, after=-1)])
    user.may(TOPIC, served.topology.journal, WRITE)
    message = served.message(channel, after=-1)
    # The library remembers for a while what it was refused.
    with user.client_of(served) as client:
        client.schedule([message])
    assert message.id in ids_of(served.arrived(channel, 2))
    assert [entry.change for entry in served.history(message.id, least=1)] == [Change.DISPATCHED]


def test_recalling_needs_read_on_the_ladder_and_write_on_the_control_topic(served: Scene, user: User) -> None:
    channel, topology = served.channel(), served.topology
    may_schedule(user, served, channel)
    message = served.message(channel, after=3600)
    with user.client_of(served) as client:
        client.schedule([message])
    user.may(TOPIC, f"{topology.prefix}.", READ, pattern=PREFIXED)
    user.may(TOPIC, topology.control, WRITE)
    user.may(GROUP, READERS, DESCRIBE)
    with user.client_of(served, confirm_timeout=2) as client, pytest.raises(BrokerError, match="reading the progress"):
        client.cancel([message.id])
    user.may(GROUP, topology.dispatch_group, DESCRIBE)
    with user.client_of(served) as client:
        client.cancel([message.id])
    assert [entry.change for entry in served.history(message.id, least=2)] == [Change.SCHEDULED, Change.CANCELLED]


def test_waiting_needs_read_on_the_journal_and_describe_on_the_rest(served: Scene, user: User) -> None:
    channel, topology = served.channel(), served.topology
    user.may(TOPIC, topology.journal, READ)
    user.may(TOPIC, topology.inbox, DESCRIBE)
    user.may(TOPIC, topology.control, DESCRIBE)
    user.may(GROUP, READERS, DESCRIBE)
    with user.client_of(served) as waiter:
        start = waiter.journal_end()
        message = served.message(channel, after=3)
        served.broker.schedule([message])
        wait_for(lambda: message.id in waiter.find_outcomes([message.id], since=start), what="the outcome")
        entries = journal_of(waiter, message.id, since=start, least=2)
        assert [entry.change for entry in entries] == [Change.SCHEDULED, Change.DISPATCHED]
        with pytest.raises((BrokerError, UnknownChannelError), match=rf"lacks a permission|has no topic '{channel}'"):
            waiter.schedule([message])


def test_a_dispatcher_needs_the_ladder_its_group_its_transactions_and_to_write_to_channels(
    scene: Scene, user: User
) -> None:
    """E1"""
    channel, private = scene.channel(), scene.channel()
    may_dispatch(user, scene, channel)
    messages = [scene.message(each, after=3) for each in (channel, private)]
    kept = scene.message(channel, after=3600)
    with user.client_of(scene) as client, dispatching(client):
        scene.broker.schedule([*messages, kept])
        assert ids_of(scene.arrived(channel, 1)) == [messages[0].id]
        # A channel that it may not write to is as good as none.
        [dead] = scene.dead([messages[1].id]).values()
        assert "authorization failed" in headers_of(dead)["delay-reason"]
        scene.broker.cancel([kept.id])
    inbox = scene.topology.inbox
    wait_for(lambda: scene.starts(inbox) == scene.ends(inbox), what="what was done is removed")


@pytest.mark.parametrize("missing", ["topics", "group", "transactional ids"])
def test_a_dispatcher_that_lacks_a_permission_says_so(scene: Scene, user: User, missing: str) -> None:
    prefix = f"{scene.topology.prefix}."
    if missing != "topics":
        user.may(TOPIC, prefix, READ, WRITE, DELETE, pattern=PREFIXED)
    else:
        user.may(TOPIC, prefix, READ, pattern=PREFIXED)
    if missing != "group":
        user.may(GROUP, scene.topology.dispatch_group, READ)
    if missing != "transactional ids":
        user.may(TRANSACTIONAL_ID, prefix, WRITE, pattern=PREFIXED)
    scene.broker.schedule([scene.message(scene.channel(), after=5)])
    with user.client_of(scene) as client:
        dispatcher = client.open_ladder_dispatcher()

        def refusal() -> str | None:
            try:
                dispatcher.run_once()
            except BrokerError as error:
                return str(error)
            return None

        text = wait_for(refusal, what="a refusal", interval=0)
        dispatcher.close()
    named = {
        "topics": "WRITE on topic delay",
        "group": "Group authorization failed",
        "transactional ids": "Transactional Id authorization failed",
    }[missing]
    assert re.search(rf"lacks a permission \(.*{named}.*\); grant it, see docs/kafka.md", text)


def test_a_dispatcher_that_may_not_delete_records_works_and_says_so(
    scene: Scene, user: User, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "TRIM_SECONDS", 0.1)
    channel, prefix = scene.channel(), f"{scene.topology.prefix}."
    user.may(TOPIC, prefix, READ, WRITE, pattern=PREFIXED)
    user.may(GROUP, scene.topology.dispatch_group, READ)
    user.may(TRANSACTIONAL_ID, prefix, WRITE, pattern=PREFIXED)
    user.may(TOPIC, channel, WRITE)
    message = scene.message(channel, after=3)
    scene.broker.schedule([message])
    with user.client_of(scene) as client, dispatching(client):
        assert ids_of(scene.arrived(channel, 1)) == [message.id]
        said = "may not DELETE records, so old records stay on disk; grant it on topics"
        wait_for(lambda: said in caplog.text, what="the dispatcher says so")


def test_a_consumer_needs_to_read_its_channel_and_its_group(served: Scene, user: User) -> None:
    channel = served.channel()
    served.broker.send([served.message(channel, after=0)])
    with user.client_of(served) as consumer:
        with pytest.raises((BrokerError, UnknownChannelError), match=rf"lacks a permission|has no topic '{channel}'"):
            consumer.receive(channel)
        user.may(TOPIC, channel, READ)
        with pytest.raises(BrokerError, match=r"lacks a permission .*Group authorization failed"):
            consumer.receive(channel)
    user.may(GROUP, f"airflow-delay.{channel}", READ)
    with user.client_of(served) as consumer:
        deliveries = wait_for(lambda: consumer.receive(channel), what="the message")
        with pytest.raises((BrokerError, UnknownChannelError, ConfigurationError)):
            consumer.requeue(deliveries[0], timedelta(seconds=1))
        with pytest.raises(BrokerError, match="lacks a permission"):
            consumer.dead_letter(deliveries[0], channel=f"{channel}.dead", reason="broken")
        consumer.ack(deliveries)
        assert consumer.receive(channel) == []


def test_requeueing_needs_to_schedule_and_dead_lettering_needs_write_on_the_dead_letter_channel(
    served: Scene, user: User
) -> None:
    channel = served.channel()
    user.may(TOPIC, channel, READ)
    user.may(GROUP, f"airflow-delay.{channel}", READ)
    may_schedule(user, served, channel)
    served.broker.send([message := served.message(channel, after=0)])
    with user.client_of(served) as consumer:
        [delivery] = wait_for(lambda: consumer.receive(channel), what="the message")
        consumer.requeue(delivery, timedelta(milliseconds=300))
        [again] = wait_for(lambda: consumer.receive(channel), what="the message again")
        assert again.message.handled_count == 1
        user.may(TOPIC, f"{channel}.dead", CREATE, WRITE)
        user.may(TOPIC, served.topology.journal, WRITE)
        consumer.dead_letter(again, channel=f"{channel}.dead", reason="broken")
    with served.open() as reader:
        [dead] = wait_for(lambda: reader.peek(f"{channel}.dead"), what="the dead letter")
    assert dead.id == message.id


def test_an_administrator_of_a_ladder_needs_its_names_only(secured: Kafka, user: User) -> None:
    scene = Scene(secured.bootstrap)
    prefix, channel = f"{scene.topology.prefix}.", scene.channel()
    user.may(TOPIC, prefix, CREATE, DELETE, DESCRIBE, DESCRIBE_CONFIGS, pattern=PREFIXED)
    user.may(TOPIC, channel, DESCRIBE)
    with scene.broker, user.client_of(scene) as admin:
        admin.create_topology([channel])
        assert [issue.text for issue in admin.verify_topology() if issue.is_problem] == []
        assert [issue.text for issue in admin.verify_topology() if "not checked" in issue.text] == []
        user.may(GROUP, scene.topology.dispatch_group, DELETE)
        admin.delete_topology(even_if_messages_wait=True)
        assert [issue.is_problem for issue in admin.verify_topology()] == [True]


def test_verify_reports_settings_that_the_user_may_not_read_as_not_checked(served: Scene, user: User) -> None:
    user.may(TOPIC, f"{served.topology.prefix}.", DESCRIBE, pattern=PREFIXED)
    with user.client_of(served) as client:
        issues = client.verify_topology()
    assert [issue for issue in issues if issue.is_problem] == []
    assert [issue.text for issue in issues if "settings were not checked" in issue.text]


def test_scheduling_without_a_ladder_and_the_permission_to_create_one_says_so(secured: Kafka, user: User) -> None:
    scene = Scene(secured.bootstrap)
    channel = scene.channel()
    user.may(TOPIC, channel, DESCRIBE)
    message = scene.message(channel, after=60)
    with scene.broker, user.client_of(scene) as client:
        assert client.check().endswith("is created with the first message")
        with pytest.raises(BrokerError, match=r"creating topic .*lacks a permission .*see docs/kafka.md") as refused:
            client.schedule([message])
    assert refused.value.unconfirmed == (message.id,)
    assert not refused.value.may_pass


def test_an_error_about_a_missing_permission_names_the_user_and_not_the_password(
    served: Scene, secured: Kafka, authority: Authority
) -> None:
    settings = served.settings | {"ssl.ca.location": str(authority.file)}
    config = KafkaConfig.from_settings(
        settings, host=secured.bootstrap_of("SASL_SSL"), login="app", password=USERS["app"]
    )
    message = served.message(served.channel(), after=60)
    with KafkaBroker(config) as client, pytest.raises((BrokerError, UnknownChannelError)) as refused:
        client.schedule([message])
    assert re.search("user app lacks a permission .*; grant it, see docs/kafka.md", str(refused.value))
    assert USERS["app"] not in f"{refused.value} {refused.value!r} {config!r}"


# -- connections that are wrong ------------------------------------------------------------------------------------

WRONG = {
    "password": r"the login of user app is refused \(.*\); correct login, password and sasl.mechanism of the connect",
    "mechanism": r"the login of user app is refused \(.*\); correct login, password and sasl.mechanism of the connect",
    "authority": r"TLS failed \(.*certificate verify failed.*\); correct security.protocol and ssl\.\*",
    "no authority": r"TLS failed \(.*certificate verify failed.*\); correct security.protocol and ssl\.\*",
    "name": r"TLS failed \(.*certificate verify failed.*\); correct security.protocol and ssl\.\*",
    "no certificate": r"TLS failed \(.*certificate.*\); correct security.protocol and ssl\.\*",
    "the plain port": r"TLS failed \(.*\); correct security.protocol and ssl\.\*.*or use the port that speaks TLS",
    "plain to the tls port": r"cannot be reached or was lost \(.*(SSL|Disconnected|transport failure).*\)",
    "host": r"cannot be reached or was lost \(.*Connection refused.*\); check host, port, security.protocol",
}


@pytest.fixture(params=WRONG)
def wrong(
    request: pytest.FixtureRequest, secured: Kafka, authority: Authority, tmp_path: Path
) -> tuple[dict[str, Any], str]:
    """A connection that does not work, and its error message."""
    kind, sasl = request.param, secured.bootstrap_of("SASL_SSL")
    extra: dict[str, Any] = {"ssl.ca.location": str(authority.file), "confirm_timeout": 2, "ladder": "nowhere"}
    good = {"conn_type": "delay_kafka", "host": sasl, "login": "app", "password": USERS["app"], "extra": extra}
    anonymous = {"conn_type": "delay_kafka", "extra": extra}
    other = Authority(tmp_path).file
    changed: dict[str, Any] = {
        "password": good | {"password": "s3cret-but-wrong"},
        "mechanism": good | {"extra": extra | {"sasl.mechanism": "SCRAM-SHA-512"}},
        "authority": good | {"extra": extra | {"ssl.ca.location": str(other)}},
        "no authority": good | {"extra": {name: value for name, value in extra.items() if name != "ssl.ca.location"}},
        "name": good | {"host": sasl.replace("localhost", "127.0.0.1")},
        "no certificate": anonymous | {"host": secured.bootstrap_of("SSL")},
        "the plain port": good | {"host": secured.bootstrap},
        "plain to the tls port": {"conn_type": "delay_kafka", "host": sasl, "extra": {"confirm_timeout": 2}},
        "host": good | {"host": f"localhost:{process.free_port()}"},
    }[kind]
    return changed, WRONG[kind]


def test_a_wrong_connection_is_reported_in_one_line_without_the_secret(
    wrong: tuple[dict[str, Any], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A12, A48"""
    connection, problem = wrong
    monkeypatch.setenv("AIRFLOW_CONN_STREAM", json.dumps(connection))
    hook = DelayHook("stream")
    with caplog.at_level(logging.DEBUG):
        works, text = hook.test_connection()
    hook.close()
    assert not works
    assert re.search(problem, text)
    assert "\n" not in text
    for secret in ("s3cret-but-wrong", USERS["app"]):
        assert secret not in f"{text} {caplog.text}"


def test_a_wrong_password_fails_a_task_with_the_remedy(
    secured: Kafka, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12, A48"""
    connection = {
        "conn_type": "delay_kafka",
        "host": secured.bootstrap_of("SASL_SSL"),
        "login": "app",
        "password": "s3cret-but-wrong",
        "extra": {"ssl.ca.location": str(authority.file), "confirm_timeout": 2},
    }
    monkeypatch.setenv("AIRFLOW_CONN_STREAM", json.dumps(connection))
    with pytest.raises(BrokerError, match=WRONG["password"]) as caught:
        TaskRun(
            ScheduleMessageOperator(
                task_id="remind", channel="orders", payload="x", deliver_after=60, delay_conn_id="stream"
            )
        )
    assert "s3cret" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_connection_with_a_password_over_tls_schedules_and_receives(
    served: Scene, secured: Kafka, authority: Authority, mechanism: str
) -> None:
    settings = served.settings | {"ssl.ca.location": str(authority.file), "sasl.mechanism": mechanism}
    config = KafkaConfig.from_settings(
        settings, host=secured.bootstrap_of("SASL_SSL"), login="admin", password=USERS["admin"]
    )
    channel = served.channel()
    with KafkaBroker(config) as client:
        assert client.check().endswith("is ready")
        message = served.message(channel, after=0.5)
        client.schedule([message])
        [delivery] = wait_for(lambda: client.receive(channel), what="the message")
        client.ack([delivery])
    assert delivery.message.id == message.id
    assert [id_of(record) for record in served.arrived(channel, 1)] == [message.id]
