"""The Kafka under test, fresh topics on it, and brokers of a test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    PartitionMetadata,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.client import NODE_LEFT
from airflow_delay_provider.domain.exceptions import BrokerError, MessagesWaitError
from tests.certificates import Authority
from tests.given import do_without, require_server
from tools.servers.component import wait_for
from tools.servers.kafka import QUICK_JVM_OPTIONS, SOON_MISSED, Kafka, KafkaCluster
from tools.servers.server import UnavailableError

ClusterT = TypeVar("ClusterT", bound=KafkaCluster)

SECONDS = 60
#: Of a secured broker: name to password. ``admin`` may do everything, ``app`` only what was granted.
USERS = {"admin": "admin-passw0rd", "app": "app-passw0rd"}
#: Clients of the first listener are administrators without a password.
SECURED_LISTENERS = {"PLAINTEXT": "PLAINTEXT", "SASL_SSL": "SASL_SSL", "SSL": "SSL"}


def require_kafka() -> str:
    """The broker to use; without one the test is skipped, on CI it fails."""
    return require_server(Kafka.variable, "Kafka")


def connection_of(bootstrap: str, **settings: Any) -> dict[str, Any]:
    """An Airflow connection to the broker, in the form of its JSON."""
    return {"conn_type": "delay_kafka", "host": bootstrap, "extra": settings}


def fresh_topic(bootstrap: str, partitions: int = 1, **config: Any) -> str:
    """Create a topic of this test only, replicated to all nodes; return its name: ``cleanup_policy="compact"``."""
    name = f"test-{uuid4().hex}"
    settings = {setting.replace("_", "."): str(value) for setting, value in config.items()}
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        create_topic(admin, NewTopic(name, partitions, config=settings))
    return name


def create_topic(admin: AdminClient, topic: NewTopic) -> None:
    """Return when it can be used, which is some time after it was created."""

    def is_created() -> bool:
        try:
            admin.create_topics([topic])[topic.topic].result(SECONDS)
        except KafkaException as error:
            # On a busy machine a node may seem to be lost for a moment, and the library then drops it.
            if error.args[0].code() in (NODE_LEFT, KafkaError._TRANSPORT):
                return False
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
        return True

    def has_leaders() -> bool:
        known = partitions_of(admin, topic.topic)
        return len(known) == topic.num_partitions and all(each.leader >= 0 for each in known.values())

    wait_for(is_created, what=f"topic {topic.topic} is created", seconds=SECONDS, interval=0.02)
    wait_for(has_leaders, what=f"topic {topic.topic} can be used", seconds=SECONDS, interval=0.02)


def partitions_of(client: Any, topic: str) -> dict[int, PartitionMetadata]:
    """Return the partitions of a topic by their numbers, as soon as a node reports them.

    The library may ask one that is gone, or that hears of the topic a moment later.
    """

    def look() -> dict[int, PartitionMetadata] | None:
        try:
            return dict(client.list_topics(topic, timeout=5).topics[topic].partitions)
        except KafkaException:
            return None

    return wait_for(look, what=f"a node reports {topic}", seconds=2 * SECONDS, interval=0.02)


def produce(
    bootstrap: str,
    topic: str,
    values: Iterable[bytes | None],
    *,
    key: bytes | None = None,
    headers: Mapping[str, bytes] | None = None,
    partition: int = -1,
    settings: Mapping[str, Any] | None = None,
) -> list[Message]:
    """Return the messages once all copies of them are written; raise when one was refused."""
    written: list[Message] = []
    refused: list[KafkaError] = []

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        if error is None:
            written.append(message)
        else:
            refused.append(error)

    with Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **(settings or {})}) as producer:
        for value in values:
            producer.produce(
                topic, value, key=key, headers=dict(headers or {}), partition=partition, on_delivery=on_delivery
            )
            producer.poll(0)
        if producer.flush(SECONDS):
            producer.purge()  # they are refused with this, and closing does not wait for them
    if refused:
        raise KafkaException(refused[0])
    return written


def read_all(
    bootstrap: str,
    topic: str,
    n: int,
    isolation: str = "read_committed",
    seconds: float = SECONDS,
    settings: Mapping[str, Any] | None = None,
) -> list[Message]:
    """Return the first ``n`` messages of a topic, in the order of each partition; fail when there are fewer."""
    own = {"group.id": f"test-{uuid4().hex}", "enable.auto.commit": False, "isolation.level": isolation}
    found: list[Message] = []
    deadline = time.monotonic() + seconds
    with Consumer({"bootstrap.servers": bootstrap, **own, **(settings or {})}) as consumer:
        partitions = partitions_of(consumer, topic)
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        while len(found) < n and (left := deadline - time.monotonic()) > 0:
            for message in consumer.consume(min(n - len(found), 10_000), timeout=min(left, 0.5)):
                if (error := message.error()) is not None:
                    raise KafkaException(error)
                found.append(message)
    if len(found) < n:
        raise TimeoutError(f"topic {topic} has {len(found)} messages and not {n} after {seconds:g} s")
    return found


def delete_ladder(broker: KafkaBroker) -> None:
    """Delete it, whatever waits in it, once its dispatchers are gone: a killed one is a member until it is missed."""

    def is_deleted() -> bool:
        try:
            broker.delete_topology(even_if_messages_wait=True)
        except MessagesWaitError:
            return False
        return True

    wait_for(is_deleted, what="the ladder is deleted", seconds=2 * SECONDS)


@contextmanager
def dispatching(client: KafkaBroker) -> Iterator[None]:
    """Run a dispatcher of this client, which must not fail."""
    stop, failed = threading.Event(), list[Exception]()

    def dispatch() -> None:
        dispatcher = client.open_ladder_dispatcher()
        while not stop.is_set():
            try:
                dispatcher.run_once()
            except Exception as error:  # noqa: BLE001 - shown at the end
                # A busy machine causes transient errors; a missing permission is not transient.
                if not (isinstance(error, BrokerError) and error.may_pass):
                    failed.append(error)
                stop.wait(0.2)
        dispatcher.close()

    thread = threading.Thread(target=dispatch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(120)
    assert failed == []


# -- brokers of a test's own ---------------------------------------------------------------------------------------


@contextmanager
def private_broker(run_dir: Path, settings: Mapping[str, str] | None = None) -> Iterator[Kafka]:
    """A broker to be killed or configured; where it cannot be had, skip, or fail on CI."""
    with _running(Kafka({**SOON_MISSED, **(settings or {})}, jvm_options=QUICK_JVM_OPTIONS), run_dir) as broker:
        yield broker


@contextmanager
def private_cluster(run_dir: Path, settings: Mapping[str, str] | None = None) -> Iterator[KafkaCluster]:
    """Three nodes, of which one may be lost: each topic has three copies, and a write needs two of them."""
    with _running(KafkaCluster({**SOON_MISSED, **(settings or {})}), run_dir) as cluster:
        yield cluster


@contextmanager
def secured_broker(run_dir: Path, authority: Authority, settings: Mapping[str, str] | None = None) -> Iterator[Kafka]:
    """A broker with authentication and authorization, at ``bootstrap_of("SASL_SSL")`` and ``bootstrap_of("SSL")``.

    The former takes USERS, by PLAIN or SCRAM-SHA-256. The latter takes certificates, and their names are those of the
    users. The broker's own certificate is for ``localhost``, so the same port at 127.0.0.1 has the wrong name.
    """
    certificate, key = authority.issue("localhost", server=True)
    both = run_dir / "broker.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    secured = {**_tls_settings(both, authority.file), **_user_settings(), **(settings or {})}
    with _running(Kafka(secured, listeners=SECURED_LISTENERS, jvm_options=QUICK_JVM_OPTIONS), run_dir) as broker:
        _add_scram_users(broker.bootstrap)
        yield broker


def client_of(user: str, authority: Authority, mechanism: str = "PLAIN") -> dict[str, Any]:
    """The settings with which librdkafka comes to SASL_SSL as one of USERS."""
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(authority.file),
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": USERS[user],
    }


def grant(
    broker: KafkaCluster,
    user: str,
    resource: ResourceType,
    name: str,
    *operations: AclOperation,
    pattern: ResourcePatternType = ResourcePatternType.LITERAL,
) -> None:
    """Let a user of a secured broker do something; return once it is in force."""
    who = (resource, name, pattern, f"User:{user}", "*")
    wanted = [AclBinding(*who, operation, AclPermissionType.ALLOW) for operation in operations]
    everything = AclBindingFilter(*who, AclOperation.ANY, AclPermissionType.ANY)
    with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
        for done in admin.create_acls(wanted).values():
            done.result(SECONDS)
        # The broker answers from what it decides by, and learns of new rules a moment after they were accepted.
        wait_for(
            lambda: set(wanted) <= set(admin.describe_acls(everything).result(SECONDS)),
            what=f"{user} may use {name}",
            seconds=SECONDS,
            interval=0.02,
        )


@contextmanager
def _running(cluster: ClusterT, run_dir: Path) -> Iterator[ClusterT]:
    try:
        try:
            cluster.start(run_dir)
        except UnavailableError as missing:
            do_without(str(missing))
        yield cluster
    finally:
        cluster.stop()


def _tls_settings(certificate_and_key: Path, authority: Path) -> dict[str, str]:
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificate_and_key),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority),
        "ssl.client.auth": "required",
        "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
    }


def _user_settings() -> dict[str, str]:
    modules, users = "org.apache.kafka.common.security", " ".join(f'user_{name}="{USERS[name]}"' for name in USERS)
    return {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{modules}.plain.PlainLoginModule required {users};",
        "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": f"{modules}.scram.ScramLoginModule required;",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        # The node itself is anonymous to itself. Clients are so at the first listener only; the others authenticate.
        "super.users": "User:admin;User:ANONYMOUS",
    }


def _add_scram_users(bootstrap: str) -> None:
    how = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    users = [UserScramCredentialUpsertion(name, how, password.encode()) for name, password in USERS.items()]
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        for done in admin.alter_user_scram_credentials(users).values():
            done.result(SECONDS)
