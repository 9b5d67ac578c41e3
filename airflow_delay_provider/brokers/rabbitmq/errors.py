"""Errors of the client library and the broker, translated to errors of this package."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from pika import exceptions as pika_errors

from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.domain.exceptions import BrokerError, ChannelError, DelayError, PayloadError, Reach

ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED = 403, 404, 406
#: The broker's words for a message above its max_message_size.
_TOO_LARGE = "larger than"


class PermissionDeniedError(BrokerError):
    """The user of the connection may not do this on the broker."""


def reply_code(error: BaseException) -> int | None:
    """Return the code with which the broker closed a channel; ``error`` may be translated already."""
    cause = error.__cause__ if isinstance(error, DelayError) else error
    code: int | None = cause.reply_code if isinstance(cause, pika_errors.ChannelClosed) else None
    return code


def translate(error: BaseException, config: RabbitMQConfig) -> DelayError:
    """Return the error of this package for one of the client library; neither contains secrets."""
    if isinstance(error, DelayError):
        return error
    text = str(getattr(error, "reply_text", "") or error) or type(error).__name__
    match reply_code(error):
        case 403:
            return PermissionDeniedError(
                f"{config.name}: user {config.login!r} lacks a permission ({text}); grant it, see docs/rabbitmq.md",
                reach=Reach.CHANNEL,
            )
        case 406 if _TOO_LARGE in text:
            return PayloadError(
                "payload",
                f"{config.name} refuses it ({text})",
                "send a reference to the data, or raise max_message_size of the broker",
            )
        case 404:
            return BrokerError(
                f"{config.name}: a part of the ladder or a queue is missing ({text});"
                " create it with `airflow delay topology create`",
                reach=Reach.CHANNEL,
            )
        case 406:
            return ChannelError(
                f"{config.name}: an object exists with other arguments ({text}); run `airflow delay topology verify`"
            )
    for cause in _causes(error):
        match cause:
            case pika_errors.ProbableAuthenticationError() | pika_errors.ProbableAccessDeniedError() if _is_guess(
                cause
            ):
                break
            case pika_errors.ProbableAuthenticationError() | pika_errors.AuthenticationError():
                return BrokerError(
                    f"{config.name}: the login of user {config.login!r} is refused;"
                    " correct login and password of the connection",
                    may_pass=False,
                )
            case pika_errors.ProbableAccessDeniedError():
                return _no_vhost(config)
            case pika_errors.ConnectionClosedByBroker() if cause.reply_code in (ACCESS_REFUSED, NOT_FOUND, 530):
                return _no_vhost(config)
            case ssl.SSLError():
                return BrokerError(
                    f"{config.name}: TLS failed ({_tls_reason(cause)}); correct ca_file, cert_file, key_file or"
                    " server_name of the connection, or use the port that speaks TLS",
                    may_pass=False,
                )
            case pika_errors.ConnectionBlockedTimeout():
                return BrokerError(
                    f"{config.name}: accepts no messages because it runs out of memory or disk; free some, then try"
                    " again"
                )
            case pika_errors.IncompatibleProtocolError() if config.tls is not None:
                return BrokerError(
                    f"{config.name}: closed the connection after TLS was set up; if it requires a client certificate,"
                    " correct cert_file and key_file of the connection, otherwise the port"
                )
            case pika_errors.IncompatibleProtocolError():
                return BrokerError(
                    f"{config.name}: closed the connection at once; either it is starting, or this port does not speak"
                    " AMQP 0-9-1: correct port or ssl of the connection"
                )
    reason = _reason(error) or text
    return BrokerError(
        f"{config.name}: cannot be reached or was lost ({reason}); check that it runs, and host and port"
    )


def _no_vhost(config: RabbitMQConfig) -> BrokerError:
    return BrokerError(
        f"{config.name}: user {config.login!r} may not use vhost {config.vhost!r}, or it does not exist;"
        " correct the connection's vhost or grant permissions on it",
        may_pass=False,
    )


def _is_guess(error: BaseException) -> bool:
    """Whether the library only assumes it: the connection ended at that step, and the broker gave no reason."""
    return pika_errors.StreamLostError.__name__ in str(error)


def _tls_reason(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)


def _reason(error: BaseException) -> str | None:
    """Return what the operating system said, without the library's words around it."""
    for cause in reversed(list(_causes(error))):
        if isinstance(cause, TimeoutError | pika_errors.ConnectionOpenAborted):
            return "no answer in time"
        if isinstance(cause, OSError):
            return cause.strerror or str(cause)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return the error and everything inside it: the library puts causes into the arguments."""
    yield error
    for inner in (*getattr(error, "args", ()), getattr(error, "exception", None), *getattr(error, "exceptions", ())):
        if isinstance(inner, BaseException):
            yield from _causes(inner)
