"""The settings of a RabbitMQ connection."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pika

from airflow_delay_provider.brokers.rabbitmq.topology import Topology
from airflow_delay_provider.domain.arguments import read_flag, read_number
from airflow_delay_provider.domain.exceptions import ConfigurationError

#: AMQP has two bytes for it.
MAX_HEARTBEAT_SECONDS = 65_535
_MAX_AGE = re.compile(r"[1-9][0-9]*[YMDhms]")


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """How the server is verified, and the client certificate."""

    #: Trusted certificates; None is the machine's own.
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    #: The name in the server's certificate, if it is not the host's.
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return the TLS context; servers are always verified."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file:
                # With an empty password the library does not ask for the one of an encrypted key.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (OSError, TypeError) as error:
            raise ConfigurationError(
                f"ca_file, cert_file, key_file: cannot be used ({error}); name readable PEM files, and a key without a"
                " password"
            ) from error
        return context


@dataclass(frozen=True, kw_only=True)
class RabbitMQConfig:
    """The settings of one connection."""

    #: Tried in this order.
    hosts: tuple[tuple[str, int], ...] = (("localhost", 5672),)
    vhost: str = "/"
    login: str = "guest"
    password: str = field(default="guest", repr=False)
    tls: TlsConfig | None = None
    heartbeat_seconds: int = 60
    #: For one attempt to reach one host.
    connect_seconds: float = 10.0
    #: How long a broker may confirm nothing, or block the connection because it runs out of memory or disk.
    confirm_seconds: float = 60.0
    topology: Topology = field(default_factory=Topology)
    #: The management API, such as ``http://user:password@host:15672``.
    management_url: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The broker as error messages name it, without secrets."""
        where = ", ".join(f"{host}:{port}" for host, port in self.hosts)
        return f"RabbitMQ at {where}, vhost {self.vhost!r}"

    @classmethod
    def from_settings(
        cls,
        settings: Mapping[str, Any],
        *,
        host: str | None = None,
        port: int | None = None,
        vhost: str | None = None,
        login: str | None = None,
        password: str | None = None,
    ) -> RabbitMQConfig:
        """Read the fields of a connection; ``settings`` is its extra."""
        tls = _read_tls(settings)
        given: dict[str, Any] = {}
        if (heartbeat := read_number(settings, "heartbeat", most=MAX_HEARTBEAT_SECONDS)) is not None:
            given["heartbeat_seconds"] = int(heartbeat)
        for name, field_name in (("connect_timeout", "connect_seconds"), ("confirm_timeout", "confirm_seconds")):
            if (seconds := read_number(settings, name, least=0.001)) is not None:
                given[field_name] = seconds
        if login:
            given |= {"login": login, "password": password or ""}
        return cls(
            hosts=_read_hosts(host, port or (5671 if tls else 5672)),
            vhost=vhost or "/",
            tls=tls,
            topology=_read_topology(settings),
            management_url=settings.get("management_url") or None,
            **given,
        )

    def parameters(self) -> list[pika.ConnectionParameters]:
        """Return the client library's parameters for each host."""
        context = self.tls.context() if self.tls else None
        return [
            pika.ConnectionParameters(
                host=host,
                port=port,
                virtual_host=self.vhost,
                credentials=pika.PlainCredentials(self.login, self.password),
                ssl_options=pika.SSLOptions(context, (self.tls and self.tls.server_name) or host) if context else None,
                heartbeat=self.heartbeat_seconds,
                socket_timeout=self.connect_seconds,
                stack_timeout=self.connect_seconds,
                blocked_connection_timeout=self.confirm_seconds,
                client_properties={"connection_name": "airflow-delay-provider"},
            )
            for host, port in self.hosts
        ]


def _read_hosts(host: str | None, port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for item in (host or "localhost").split(","):
        name, _, own_port = item.strip().rpartition(":") if item.count(":") == 1 else (item.strip(), "", "")
        if not name or (own_port and not own_port.isdigit()) or int(own_port or port) not in range(1, 65_536):
            raise ConfigurationError(f"host: {host!r} with port {port} is not a list of hosts; use 'a,b:5673'")
        hosts.append((name, int(own_port or port)))
    return tuple(hosts)


def _read_tls(settings: Mapping[str, Any]) -> TlsConfig | None:
    files = {name: settings.get(name) or None for name in ("ca_file", "cert_file", "key_file", "server_name")}
    # An untouched switch of the form says no; that must not send a password in clear text.
    return TlsConfig(**files) if read_flag(settings, "ssl", default=False) or any(files.values()) else None


def _read_topology(settings: Mapping[str, Any]) -> Topology:
    given: dict[str, Any] = {"journal": read_flag(settings, "journal", default=True)}
    if namespace := settings.get("prefix"):
        given["namespace"] = str(namespace)
    if (tick := read_number(settings, "tick")) is not None:
        given["tick_ms"] = round(tick * 1000)
    if (most := read_number(settings, "max_length", least=1)) is not None:
        given["max_length"] = int(most)
    if age := settings.get("journal_max_age"):
        if not isinstance(age, str) or not _MAX_AGE.fullmatch(age):
            raise ConfigurationError(f"journal_max_age: {age!r} is not an age; use for example 7D, 12h or 30m")
        given["journal_max_age"] = age
    return Topology(**given)
