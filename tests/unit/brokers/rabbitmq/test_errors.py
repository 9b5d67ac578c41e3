from __future__ import annotations

import ssl

import pytest
from pika import exceptions as pika_errors
from pika.adapters.utils.connection_workflow import (
    AMQPConnectionWorkflowFailed,
    AMQPConnectorAMQPHandshakeError,
    AMQPConnectorSocketConnectError,
    AMQPConnectorTransportSetupError,
)

from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.errors import PermissionDeniedError, reply_code, translate
from airflow_delay_provider.domain.exceptions import BrokerError, ChannelError, PayloadError, Reach

SECRET = "s3cret-passw0rd"
CONFIG = RabbitMQConfig(hosts=(("mq", 5672),), vhost="delay", login="me", password=SECRET)
WHERE = "RabbitMQ at mq:5672, vhost 'delay': "


def failed(inner: BaseException) -> AMQPConnectionWorkflowFailed:
    return AMQPConnectionWorkflowFailed([inner])


REFUSED_LOGIN = pika_errors.ProbableAuthenticationError("ConnectionClosedByBroker: (403) 'ACCESS_REFUSED - Login'")
REFUSED_VHOST = pika_errors.ProbableAccessDeniedError("ConnectionClosedByBroker: (530) 'NOT_ALLOWED - vhost x'")
LOST_IN_LOGIN = pika_errors.ProbableAuthenticationError("StreamLostError: ('Stream connection lost: ...',)")
LOST_IN_TUNING = pika_errors.ProbableAccessDeniedError("StreamLostError: ('Stream connection lost: ...',)")


@pytest.mark.parametrize(
    ("error", "kind", "text", "may_pass"),
    [
        (failed(AMQPConnectorAMQPHandshakeError(REFUSED_LOGIN)), BrokerError, "the login of user 'me' is refused; correct login and password of the connection", False),  # noqa: E501
        (failed(AMQPConnectorAMQPHandshakeError(REFUSED_VHOST)), BrokerError, "user 'me' may not use vhost 'delay', or it does not exist; correct the connection's vhost or grant permissions on it", False),  # noqa: E501
        (failed(AMQPConnectorAMQPHandshakeError(LOST_IN_LOGIN)), BrokerError, "cannot be reached or was lost (AMQPConnectionWorkflowFailed); check that it runs, and host and port", True),  # noqa: E501
        (failed(AMQPConnectorAMQPHandshakeError(LOST_IN_TUNING)), BrokerError, "cannot be reached or was lost (AMQPConnectionWorkflowFailed); check that it runs, and host and port", True),  # noqa: E501
        (pika_errors.ConnectionClosedByBroker(530, "NOT_ALLOWED"), BrokerError, "user 'me' may not use vhost 'delay', or it does not exist; correct the connection's vhost or grant permissions on it", False),  # noqa: E501
        (pika_errors.AMQPConnectionError(failed(AMQPConnectorSocketConnectError(ConnectionRefusedError(111, "Connection refused")))), BrokerError, "cannot be reached or was lost (Connection refused); check that it runs, and host and port", True),  # noqa: E501
        (pika_errors.ConnectionOpenAborted("Timeout while setting up AMQP"), BrokerError, "cannot be reached or was lost (no answer in time); check that it runs, and host and port", True),  # noqa: E501
        (TimeoutError(), BrokerError, "cannot be reached or was lost (no answer in time); check that it runs, and host and port", True),  # noqa: E501
        (pika_errors.StreamLostError("Stream connection lost"), BrokerError, "cannot be reached or was lost (Stream connection lost); check that it runs, and host and port", True),  # noqa: E501
        (pika_errors.ConnectionClosedByBroker(320, "CONNECTION_FORCED - shutdown"), BrokerError, "cannot be reached or was lost (CONNECTION_FORCED - shutdown); check that it runs, and host and port", True),  # noqa: E501
        (failed(AMQPConnectorTransportSetupError(ssl.SSLError(1, "[SSL] certificate verify failed"))), BrokerError, "TLS failed ([SSL] certificate verify failed); correct ca_file, cert_file, key_file or server_name of the connection, or use the port that speaks TLS", False),  # noqa: E501
        (pika_errors.ConnectionBlockedTimeout("blocked"), BrokerError, "accepts no messages because it runs out of memory or disk; free some, then try again", True),  # noqa: E501
        (pika_errors.IncompatibleProtocolError("old"), BrokerError, "closed the connection at once; either it is starting, or this port does not speak AMQP 0-9-1: correct port or ssl of the connection", True),  # noqa: E501
        (pika_errors.ChannelClosedByBroker(403, "ACCESS_REFUSED - access to queue 'q'"), PermissionDeniedError, "user 'me' lacks a permission (ACCESS_REFUSED - access to queue 'q'); grant it, see docs/rabbitmq.md", True),  # noqa: E501
        (pika_errors.ChannelClosedByBroker(404, "NOT_FOUND - no exchange 'e'"), BrokerError, "a part of the ladder or a queue is missing (NOT_FOUND - no exchange 'e'); create it with `airflow delay topology create`", True),  # noqa: E501
        (pika_errors.ChannelClosedByBroker(406, "PRECONDITION_FAILED - inequivalent arg"), ChannelError, "an object exists with other arguments (PRECONDITION_FAILED - inequivalent arg); run `airflow delay topology verify`", None),  # noqa: E501
    ],
)  # fmt: skip
def test_translated_errors_name_the_remedy_and_no_secret(
    error: BaseException, kind: type[Exception], text: str, *, may_pass: bool | None
) -> None:
    """A12"""
    translated = translate(error, CONFIG)
    assert type(translated) is kind
    assert str(translated) == WHERE + text
    assert getattr(translated, "may_pass", None) is may_pass
    assert SECRET not in f"{translated} {translated!r}"


def test_a_message_that_is_too_large_is_not_taken_for_an_object_with_other_arguments() -> None:
    """A25: one concerns the message, the other needs an administrator."""
    text = "PRECONDITION_FAILED - message size 9 is larger than configured max size 8"
    translated = translate(pika_errors.ChannelClosedByBroker(406, text), CONFIG)
    assert type(translated) is PayloadError
    assert translated.reach is Reach.MESSAGE
    other = translate(pika_errors.ChannelClosedByBroker(406, "PRECONDITION_FAILED - inequivalent arg"), CONFIG)
    assert other.reach is Reach.CHANNEL


def test_errors_of_this_package_are_not_translated() -> None:
    error = PayloadError("payload", "is too large", "send less")
    assert translate(error, CONFIG) is error


def test_the_code_of_the_broker_is_read_where_there_is_one() -> None:
    assert reply_code(pika_errors.ChannelClosedByBroker(404, "NOT_FOUND")) == 404
    assert reply_code(ValueError("x")) is None
