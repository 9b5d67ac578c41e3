"""The settings of a Kafka connection as settings of Java's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.inbox.java_client import JavaClientSettings

PASSWORD = "s3cret"
TRADITIONAL, PKCS8 = pem.PrivateFormat.TraditionalOpenSSL, pem.PrivateFormat.PKCS8


def settings_of(extra: dict[str, Any], **more: Any) -> JavaClientSettings:
    return JavaClientSettings.of(KafkaConfig.from_settings(extra, host="kafka", **more))


def key_text(form: pem.PrivateFormat, password: bytes | None = None) -> str:
    key = ec.generate_private_key(ec.SECP256R1()) if form is PKCS8 else rsa.generate_private_key(65537, 2048)
    encryption = pem.NoEncryption() if password is None else pem.BestAvailableEncryption(password)
    return key.private_bytes(pem.Encoding.PEM, form, encryption).decode()


def test_a_plain_connection_needs_no_secret_and_loses_nothing() -> None:
    found = settings_of({})
    assert found.secret == {}
    assert found.plain["bootstrap.servers"] == "kafka:9092"
    assert found.plain["security.protocol"] == "PLAINTEXT"
    assert (found.plain["acks"], found.plain["enable.idempotence"]) == ("all", "true")


@pytest.mark.parametrize("weak", [{"acks": "0"}, {"request.required.acks": "0"}, {"enable.idempotence": "false"}])
def test_a_connection_cannot_make_the_write_less_safe(weak: dict[str, str]) -> None:
    found = settings_of(weak)
    assert (found.plain["acks"], found.plain["enable.idempotence"]) == ("all", "true")
    assert "request.required.acks" not in found.plain


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ("PLAIN", "plain.PlainLoginModule"),
        ("scram-sha-256", "scram.ScramLoginModule"),
        (None, "plain.PlainLoginModule"),
    ],
)
def test_a_login_is_secret(mechanism: str | None, module: str) -> None:
    extra = {} if mechanism is None else {"sasl.mechanism": mechanism}
    found = settings_of(extra, login="app", password=PASSWORD)
    assert found.secret == {
        "sasl.jaas.config": f'org.apache.kafka.common.security.{module} required username="app" password="{PASSWORD}";'
    }
    assert found.plain["sasl.mechanism"] == (mechanism or "PLAIN").upper()
    assert found.plain["security.protocol"] == "SASL_SSL"
    assert PASSWORD not in repr(found)
    assert PASSWORD not in str(found.plain)


def test_a_password_cannot_end_its_quotes() -> None:
    found = settings_of({}, login="app", password='a"b\\c\nd')
    assert 'password="a\\"b\\\\c\\nd";' in found.secret["sasl.jaas.config"]


def test_certificates_are_texts_that_executors_need_no_file_for(tmp_path: Path) -> None:
    for name in ("ca", "certificate", "key"):
        (tmp_path / name).write_text(key_text(PKCS8) if name == "key" else f"-- {name} --")
    found = settings_of({f"ssl.{name}.location": str(tmp_path / name) for name in ("ca", "certificate", "key")})
    assert found.plain["security.protocol"] == "SSL"
    assert (found.plain["ssl.truststore.type"], found.plain["ssl.keystore.type"]) == ("PEM", "PEM")
    assert found.secret == {
        "ssl.truststore.certificates": "-- ca --",
        "ssl.keystore.certificate.chain": "-- certificate --",
        "ssl.keystore.key": (tmp_path / "key").read_text(),
    }


@pytest.mark.parametrize(("form", "password"), [(TRADITIONAL, None), (TRADITIONAL, PASSWORD), (PKCS8, PASSWORD)])
def test_a_private_key_takes_the_form_that_java_reads(form: pem.PrivateFormat, password: str | None) -> None:
    given = key_text(form, None if password is None else password.encode())
    extra: dict[str, Any] = {
        "security.protocol": "ssl",
        "ssl.certificate.pem": "-- certificate --",
        "ssl.key.pem": given,
    }
    if password is not None:
        extra["ssl.key.password"] = password
    key = settings_of(extra).secret["ssl.keystore.key"]
    assert key.startswith("-----BEGIN PRIVATE KEY-----")
    before = pem.load_pem_private_key(given.encode(), None if password is None else password.encode())
    after = pem.load_pem_private_key(key.encode(), None)
    form_of_public = (pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    assert after.public_key().public_bytes(*form_of_public) == before.public_key().public_bytes(*form_of_public)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (
            {"sasl.mechanism": "OAUTHBEARER", "security.protocol": "SASL_SSL"},
            "sasl.mechanism: OAUTHBEARER is not suppo",
        ),
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism: GSSAPI is not supported here"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}, "sasl.username: SASL_SSL needs a login"),
        ({"ssl.keystore.location": "k.p12"}, "ssl.keystore.location: has no equal in Spark's Kafka client"),
        ({"sasl.oauthbearer.config": "x"}, "sasl.oauthbearer.config: has no equal"),
        (
            {"security.protocol": "SSL", "enable.ssl.certificate.verification": "false"},
            "enable.ssl.certificate.verification: Java always verifies",
        ),
        ({"ssl.ca.location": "/nowhere/ca.pem"}, "ssl.ca.location: /nowhere/ca.pem cannot be read on the driver"),
        ({"security.protocol": "SSL", "ssl.certificate.pem": "x"}, "ssl.key.location: certificate and key belong toge"),
        (
            {"security.protocol": "SSL", "ssl.certificate.pem": "x", "ssl.key.pem": "no key"},
            "ssl.key.location: the private key cannot be read",
        ),
    ],
)
def test_what_java_cannot_do_is_refused(extra: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        settings_of(extra)


def test_a_name_may_be_left_unchecked_on_purpose_only() -> None:
    tls = {"security.protocol": "SSL"}
    assert "ssl.endpoint.identification.algorithm" not in settings_of(tls).plain
    off = settings_of(tls | {"ssl.endpoint.identification.algorithm": "none"})
    assert off.plain["ssl.endpoint.identification.algorithm"] == ""


def test_settings_about_speed_are_passed_where_java_has_them_and_named_where_not() -> None:
    found = settings_of({"compression.type": "zstd", "queue.buffering.max.kbytes": "1", "socket.nagle.disable": "true"})
    assert found.plain["compression.type"] == "zstd"
    assert found.unused == ("queue.buffering.max.kbytes", "socket.nagle.disable")
