"""The RabbitMQ under test, and fresh names on it.

Tests run on the oldest version that is supported. Those that may tell versions apart run on each of them: they, and the
fixtures that they share, ask for the fixture ``rabbitmq_version``, or ``queue_type`` for
queues of both types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import httpx
import pika

from airflow_delay_provider.brokers.rabbitmq import admin, verify
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.receive import Receiver
from airflow_delay_provider.brokers.rabbitmq.topology import Topology
from tests.given import do_without, require_server
from tools.servers.rabbitmq import SOON_DEAD_LETTERED_AGAIN, RabbitMQ, RabbitMQ4
from tools.servers.server import UnavailableError

URL_VARIABLE = RabbitMQ.variable
#: The password of users that tests create.
SECRET = "s3cret-passw0rd"
#: The servers of the versions that are tested.
VERSIONS: dict[str, type[RabbitMQ]] = {"rabbitmq3": RabbitMQ, "rabbitmq4": RabbitMQ4}
_under_test = "rabbitmq3"


@contextmanager
def under_test(version: str) -> Iterator[None]:
    """Inside, everything here is about the server of this version: one at a time is tested, and fixtures of any depth
    ask for it."""
    global _under_test
    before, _under_test = _under_test, version
    try:
        yield
    finally:
        _under_test = before


def require_rabbitmq() -> str:
    """The server to use; without one the test is skipped, on CI it fails."""
    return require_server(VERSIONS[_under_test].variable, "RabbitMQ")


def require_management() -> str:
    """Where the server is managed."""
    return require_server(VERSIONS[_under_test].management_variable, "RabbitMQ")


def config_of(url: str, **settings: Any) -> RabbitMQConfig:
    """The configuration of a connection to the server at ``url``."""
    parts = urlsplit(url)
    return RabbitMQConfig.from_settings(
        settings,
        host=parts.hostname,
        port=parts.port,
        vhost=unquote(parts.path[1:]) or "/",
        login=parts.username,
        password=parts.password,
    )


def declare_queue(url: str, name: str, **arguments: Any) -> None:
    """Declare a durable queue, as a consumer of ours would."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        connection.channel().queue_declare(name, durable=True, arguments=arguments)


def bind_queue(url: str, name: str, *, exchange: str) -> None:
    """Bind a queue by its name to an exchange."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        connection.channel().queue_bind(name, exchange, name)


def connection_of(url: str, **settings: Any) -> dict[str, Any]:
    """An Airflow connection to the server at ``url``, in the form of its JSON."""
    parts = urlsplit(url)
    return {
        "conn_type": "rabbitmq",
        "host": parts.hostname,
        "port": parts.port,
        "schema": unquote(parts.path[1:]) or "/",
        "login": parts.username,
        "password": parts.password,
        "extra": settings,
    }


class ChannelQueues:
    """Queues that a test uses as channels. Hundreds of idle ones would keep a broker busy, so they are deleted."""

    def __init__(self, amqp: Any, topology: Topology, kind: str = "quorum") -> None:
        self._amqp = amqp
        self._topology = topology
        self._kind = kind
        self._names: list[str] = []

    def declare(self, name: str) -> None:
        self._amqp.queue_declare(name, durable=True, arguments={"x-queue-type": self._kind})
        self._names.append(name)

    def delete_all(self) -> None:
        for name in self._names:
            self._amqp.queue_delete(name)
            self._amqp.queue_delete(self._topology.relay(name))


@contextmanager
def counted_looks() -> Iterator[None]:
    """Inside, ``peek`` works on every version: a delivery more does no harm to queues without a delivery limit."""
    with patch.object(Receiver, "_refuse_counted_look"):
        yield


@contextmanager
def fresh_vhost() -> Iterator[str]:
    """The URL of a new vhost, for tests that change a ladder; deleted with everything in it."""
    url, name = require_rabbitmq(), f"test-{uuid4().hex}"
    user = urlsplit(url).username
    manage("PUT", f"vhosts/{name}")
    try:
        manage("PUT", f"permissions/{name}/{user}", {"configure": ".*", "write": ".*", "read": ".*"})
        # This broker is not killed, so no queue has to settle, and its default settings are good enough.
        with patch.object(admin, "SETTLE_SECONDS", 0), patch.object(verify, "find_late_retry", return_value=()):
            yield f"{url.rpartition('/')[0]}/{name}"
    finally:
        manage("DELETE", f"vhosts/{name}")


@contextmanager
def user(url: str, *, configure: str = "^$", write: str = "^$", read: str = "^$") -> Iterator[str]:
    """The URL of the same vhost for a new user with these permissions."""
    name, parts = f"user-{uuid4().hex[:12]}", urlsplit(url)
    manage("PUT", f"users/{name}", {"password": SECRET, "tags": ""})
    try:
        permissions = {"configure": configure, "write": write, "read": read}
        manage("PUT", f"permissions/{parts.path[1:]}/{name}", permissions)
        yield parts._replace(netloc=f"{name}:{SECRET}@{parts.hostname}:{parts.port}").geturl()
    finally:
        manage("DELETE", f"users/{name}")


def manage(method: str, path: str, content: Any = None) -> None:
    """Ask the management API of the server under test."""
    httpx.request(method, f"{require_management()}/api/{path}", json=content, timeout=240).raise_for_status()


@contextmanager
def private_node(
    run_dir: Path, settings: Mapping[str, str] | None = None, *, advanced: str = SOON_DEAD_LETTERED_AGAIN
) -> Iterator[RabbitMQ]:
    """A node of the test's own, to be killed or configured; where it cannot be had, skip, or fail on CI."""
    node = VERSIONS[_under_test](settings, advanced=advanced)
    try:
        node.start(run_dir)
    except UnavailableError as missing:
        do_without(str(missing))
    try:
        yield node
    finally:
        node.stop()


def problems(broker: RabbitMQBroker) -> list[str]:
    """What verify finds wrong, but for what no connection without ``management_url`` can do."""
    found = [issue.text for issue in broker.verify_topology() if issue.is_problem]
    return [text for text in found if "without management_url, messages are reported" not in text]
