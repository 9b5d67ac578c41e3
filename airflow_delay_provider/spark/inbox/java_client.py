"""The settings of a Kafka connection, which are those of librdkafka, for Spark's Kafka client, which is Java's.

Texts that are secret, and files that only the driver has, are kept apart: they may not stand in a query plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_delay_provider.brokers.kafka.client import BATCH_BYTES
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.topology import MAX_RECORD_BYTES
from airflow_delay_provider.domain.exceptions import ConfigurationError

_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
#: Settings that mean the same in both clients.
_SAME = {
    "client.id",
    "client.rack",
    "compression.type",
    "connections.max.idle.ms",
    "metadata.max.age.ms",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
}
_TRANSLATED = {
    "bootstrap.servers",
    "enable.ssl.certificate.verification",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.password",
    "sasl.username",
    "security.protocol",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.key.pem",
}
#: Others of these decide who the broker is, or who we are: leaving them out would not be safe.
_SECURITY = ("enable.ssl.", "sasl.", "security.", "ssl.")
#: As long as Java's clients wait by default: a batch job may wait longer than a call.
_LEAST_TIMEOUT_MS = 120_000
_LINGER_MS = 20


@dataclass(frozen=True, kw_only=True)
class JavaClientSettings:
    """Settings of Java's producer."""

    plain: Mapping[str, str]
    #: Only for a file that each executor reads.
    secret: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Names in the connection that only librdkafka has: they are about speed.
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: KafkaConfig) -> JavaClientSettings:
        """Translate the settings of a connection; refuse what Java's client cannot do."""
        client = {name: value for name, value in config.client.items() if value not in (None, "")}
        refused = sorted(name for name in client if name.startswith(_SECURITY) and name not in _TRANSLATED)
        if refused:
            raise _unsuitable(refused[0], "has no equal in Spark's Kafka client")
        protocol = str(client.get("security.protocol", "PLAINTEXT")).upper()
        secret = _login(client, protocol) if protocol.startswith("SASL_") else {}
        plain = {"security.protocol": protocol, **_producer(config)}
        if secret:
            plain["sasl.mechanism"] = _mechanism(client)
        if protocol.endswith("SSL"):
            more, files = _tls(client)
            plain, secret = plain | more, secret | files
        plain |= {name: str(client[name]) for name in sorted(_SAME & client.keys())}
        unused = sorted(client.keys() - _SAME - _TRANSLATED)
        return cls(plain=plain, secret=secret, unused=tuple(unused))


def _producer(config: KafkaConfig) -> dict[str, str]:
    """Return settings with which a record is confirmed by all replicas in sync and stored once, in order."""
    timeout_ms = max(_LEAST_TIMEOUT_MS, round(config.confirm_seconds * 1000))
    return {
        "bootstrap.servers": str(config.client["bootstrap.servers"]),
        "acks": "all",
        "enable.idempotence": "true",
        "delivery.timeout.ms": str(timeout_ms),
        "max.block.ms": str(timeout_ms),
        "max.request.size": str(MAX_RECORD_BYTES),
        "buffer.memory": str(4 * MAX_RECORD_BYTES),
        "batch.size": str(BATCH_BYTES),
        "linger.ms": str(_LINGER_MS),
    }


def _mechanism(client: Mapping[str, Any]) -> str:
    # GSSAPI is what librdkafka uses if none is given.
    return str(client.get("sasl.mechanism") or client.get("sasl.mechanisms") or "GSSAPI").upper()


def _login(client: Mapping[str, Any], protocol: str) -> dict[str, str]:
    mechanism = _mechanism(client)
    if mechanism not in _LOGIN_MODULES:
        raise _unsuitable("sasl.mechanism", f"{mechanism} is not supported here: use {', '.join(_LOGIN_MODULES)}")
    if not client.get("sasl.username"):
        raise ConfigurationError(f"sasl.username: {protocol} needs a login; set login and password of the connection")
    user, password = _quoted(client["sasl.username"]), _quoted(client.get("sasl.password", ""))
    return {"sasl.jaas.config": f"{_LOGIN_MODULES[mechanism]} required username={user} password={password};"}


def _quoted(value: Any) -> str:
    """Return a text in the quotes of JAAS."""
    text = str(value)
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(character, escaped)
    return f'"{text}"'


def _tls(client: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    if str(client.get("enable.ssl.certificate.verification", "true")).lower() not in ("true", "1"):
        raise _unsuitable("enable.ssl.certificate.verification", "Java always verifies: give ssl.ca.location")
    plain, secret = dict[str, str](), dict[str, str]()
    if (check := client.get("ssl.endpoint.identification.algorithm")) is not None:
        plain["ssl.endpoint.identification.algorithm"] = "" if str(check).lower() == "none" else str(check)
    authority = _pem(client, "ssl.ca")
    if authority is not None:
        plain["ssl.truststore.type"] = "PEM"
        secret["ssl.truststore.certificates"] = authority
    certificate, key = _pem(client, "ssl.certificate"), _pem(client, "ssl.key")
    if (certificate is None) is not (key is None):
        raise ConfigurationError("ssl.key.location: certificate and key belong together; give both or neither")
    if certificate is not None and key is not None:
        plain["ssl.keystore.type"] = "PEM"
        secret["ssl.keystore.certificate.chain"] = certificate
        secret["ssl.keystore.key"] = _as_pkcs8(key, client.get("ssl.key.password"))
    return plain, secret


def _pem(client: Mapping[str, Any], name: str) -> str | None:
    """Return the text of ``name.pem``, or of the file at ``name.location``."""
    if (text := client.get(f"{name}.pem")) is not None:
        return str(text)
    location = client.get(f"{name}.location")
    if location is None:
        return None
    try:
        return Path(str(location)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not PEM"
        raise ConfigurationError(
            f"{name}.location: {location} cannot be read on the driver ({why}); name a PEM file that it can read"
        ) from None


def _as_pkcs8(key: str, password: Any) -> str:
    """Return a private key in the one form that Java's client reads."""
    if password is None and "BEGIN PRIVATE KEY" in key:
        return key
    from cryptography.hazmat.primitives import serialization as pem

    try:
        loaded = pem.load_pem_private_key(key.encode(), None if password is None else str(password).encode())
    except (TypeError, ValueError):
        raise ConfigurationError(
            "ssl.key.location: the private key cannot be read; give a PEM key, and its ssl.key.password if it has one"
        ) from None
    return loaded.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()).decode()


def _unsuitable(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(f'{name}: {why}; or write with df.write.format("delay"), which uses librdkafka')
