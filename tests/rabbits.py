"""The RabbitMQ under test, and fresh names on it."""

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

from airflow_delay_provider.brokers.rabbitmq import declaring
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from tests.given import do_without, require_server
from tests.servers.rabbitmq import SOON_DEAD_LETTERED_AGAIN, RabbitMQ
from tests.servers.server import UnavailableError

URL_VARIABLE = "DELAY_TEST_RABBITMQ_URL"
MANAGEMENT_VARIABLE = "DELAY_TEST_RABBITMQ_MANAGEMENT_URL"


def require_rabbitmq() -> str:
    """The server to use; without one the test is skipped, on CI it fails."""
    return require_server(URL_VARIABLE, "RabbitMQ")


def require_management() -> str:
    """Where the server is managed."""
    return require_server(MANAGEMENT_VARIABLE, "RabbitMQ")


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


@contextmanager
def fresh_vhost() -> Iterator[str]:
    """The URL of a vhost that nobody else uses, for tests that change a ladder; deleted with all that is in it."""
    url, name = require_rabbitmq(), f"test-{uuid4().hex}"
    user = urlsplit(url).username
    manage("PUT", f"vhosts/{name}")
    try:
        manage("PUT", f"permissions/{name}/{user}", {"configure": ".*", "write": ".*", "read": ".*"})
        # Nobody kills this broker, so no queue has to settle.
        with patch.object(declaring, "SETTLE_SECONDS", 0):
            yield f"{url.rpartition('/')[0]}/{name}"
    finally:
        manage("DELETE", f"vhosts/{name}")


def manage(method: str, path: str, content: Any = None) -> None:
    """Ask the management API of the server under test."""
    httpx.request(method, f"{require_management()}/api/{path}", json=content, timeout=240).raise_for_status()


@contextmanager
def private_node(run_dir: Path, settings: Mapping[str, str] | None = None) -> Iterator[RabbitMQ]:
    """A node of the test's own, to be killed or configured; where it cannot be had, skip, or fail on CI."""
    node = RabbitMQ(settings, advanced=SOON_DEAD_LETTERED_AGAIN)
    try:
        node.start(run_dir)
    except UnavailableError as missing:
        do_without(str(missing))
    try:
        yield node
    finally:
        node.stop()
