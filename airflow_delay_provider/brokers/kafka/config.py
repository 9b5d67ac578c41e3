"""The settings of a Kafka connection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.arguments import read_number
from airflow_delay_provider.domain.exceptions import ConfigurationError

DEFAULT_PORT = 9092
DEFAULT_CONSUMER_GROUP = "airflow-delay"
_TLS_FILES = {"ssl.ca.location", "ssl.certificate.location", "ssl.key.location"}
_ADDRESS = re.compile(r"(?:[a-z_]+://)?(?:\[[0-9a-f:]+\]|[^\s:/]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
#: Set by this package: with other values messages could be lost, duplicated or reordered.
_OURS = {
    "acks",
    "auto.offset.reset",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.idempotence",
    "enable.partition.eof",
    "group.id",
    "group.instance.id",
    "isolation.level",
    "partition.assignment.strategy",
    "request.required.acks",
    "transactional.id",
}


@dataclass(frozen=True, kw_only=True)
class KafkaConfig:
    """The settings of one connection."""

    #: Settings of the client library: addresses, TLS, SASL.
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    topology: Topology = field(default_factory=Topology)
    #: The consumer group of a channel is this name, a dot and the channel.
    consumer_group: str = DEFAULT_CONSUMER_GROUP
    #: How long the broker may take to confirm a message, and a dispatcher to answer a command.
    confirm_seconds: float = 30.0

    @property
    def name(self) -> str:
        """The name of this broker in messages; no secrets."""
        return f"Kafka at {self.client.get('bootstrap.servers', 'nowhere')}"

    @property
    def user(self) -> str:
        """The user in messages."""
        return str(self.client.get("sasl.username") or "without a login")

    @classmethod
    def from_settings(
        cls,
        settings: Mapping[str, Any],
        *,
        host: str | None = None,
        port: int | None = None,
        login: str | None = None,
        password: str | None = None,
    ) -> KafkaConfig:
        """Read a connection; ``settings`` is its extra.

        Names with a dot are passed to the client library, except those that this package sets itself. Names without a
        dot are settings of this package.
        """
        client = {
            name: value
            for name, value in settings.items()
            # A form stores empty text for an empty field.
            if "." in name and name not in _OURS and value not in (None, "")
        }
        if host:
            client["bootstrap.servers"] = _addresses(host, port or DEFAULT_PORT)
        if not client.get("bootstrap.servers"):
            raise ConfigurationError(
                "bootstrap.servers: is not given; set the connection's host, or bootstrap.servers in its extra"
            )
        if login:
            client |= {"sasl.username": login, "sasl.password": password or ""}
            # Both are names of one setting.
            if not client.keys() & {"sasl.mechanism", "sasl.mechanisms"}:
                client["sasl.mechanism"] = "PLAIN"
            # A password is not sent in clear text unless that is asked for.
            protocol = client.setdefault("security.protocol", "SASL_SSL")
            if not str(protocol).upper().startswith("SASL_"):
                raise ConfigurationError(
                    f"security.protocol: {protocol!r} sends no login; use SASL_SSL, or leave the login empty"
                )
        elif client.keys() & _TLS_FILES:
            client.setdefault("security.protocol", "SSL")
        given: dict[str, Any] = {}
        if (seconds := read_number(settings, "confirm_timeout", least=0.001)) is not None:
            given["confirm_seconds"] = seconds
        return cls(
            client=client,
            topology=_read_topology(settings),
            consumer_group=str(settings.get("consumer_group") or settings.get("group.id") or DEFAULT_CONSUMER_GROUP),
            **given,
        )


def _addresses(host: str, port: int) -> str:
    addresses = []
    for item in host.split(","):
        found = _ADDRESS.fullmatch(item.strip())
        if found is None or int(found[1] or port) not in range(1, 65_536):
            raise ConfigurationError(f"host: {host!r} with port {port} is not a list of hosts; use 'a,b:9093'")
        addresses.append(found[0] if found[1] else f"{found[0]}:{port}")
    return ",".join(addresses)


def _read_topology(settings: Mapping[str, Any]) -> Topology:
    given: dict[str, Any] = {}
    if ladder := settings.get("ladder"):
        given["name"] = str(ladder)
    for name, most in (("partitions", 1000), ("replication_factor", 100), ("radix", 64)):
        if (number := read_number(settings, name, least=1, most=most)) is not None:
            given[name] = int(number)
    if (days := read_number(settings, "journal_days", least=0.001, most=36_500)) is not None:
        given["journal_retention_ms"] = round(days * 86_400_000)
    return Topology(**given)
