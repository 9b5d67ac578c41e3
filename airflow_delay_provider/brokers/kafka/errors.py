"""What the client library and the broker report, said in sentences of this package."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.exceptions import (
    BrokerError,
    ConfigurationError,
    DelayError,
    PayloadError,
    Reach,
    UnknownChannelError,
)

#: The topic is not there.
MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
#: The login may not do it.
DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
#: One record cannot be stored, whoever tries.
UNFIT = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
}
LOGIN = {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED}
_TLS = {KafkaError._SSL, KafkaError._CRIT_SYS_RESOURCE}


def code_of(error: BaseException | KafkaError) -> int | None:
    """Return the library's code of an error."""
    inner = error if isinstance(error, KafkaError) else error_of(error)
    return None if inner is None else int(inner.code())


def error_of(error: BaseException) -> KafkaError | None:
    """Return the library's error inside an exception."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else None
    return inner if isinstance(inner, KafkaError) else None


def translate(
    error: BaseException | KafkaError, config: KafkaConfig, *, doing: str = "", clue: str | None = None
) -> DelayError:
    """Return the error of this package for one of the client library; secrets are in neither.

    :param clue: what the library has last said of its connections, where the error itself is only a time that ran out.
    """
    if isinstance(error, DelayError):
        return error
    code = code_of(error)
    inner = error if isinstance(error, KafkaError) else error_of(error)
    text = inner.str() if inner is not None else str(error) or type(error).__name__
    what = f"{config.name}: {doing}: " if doing else f"{config.name}: "
    if code in DENIED:
        return BrokerError(
            f"{what}user {config.user} lacks a permission ({text}); grant it, see docs/kafka.md",
            may_pass=False,
            reach=Reach.CHANNEL if code == KafkaError.TOPIC_AUTHORIZATION_FAILED else Reach.BROKER,
        )
    if code in MISSING:
        return UnknownChannelError("channel", f"{what}{text}", "create the topic, or correct its name")
    if code in UNFIT:
        return PayloadError("payload", f"{what}{text}", "send a reference to the data, or raise max.message.bytes")
    if code == KafkaError._INVALID_ARG and inner is None:
        return ConfigurationError(f"{what}{text}; correct the connection's extra")
    if code in LOGIN or (clue and ("uthentication" in clue or "SASL mechanism" in clue)):
        return BrokerError(
            f"{what}the login of user {config.user} is refused ({_short(clue or text)}); correct login, password and"
            " sasl.mechanism of the connection",
            may_pass=False,
        )
    if code in _TLS or (clue and "SSL" in clue):
        return BrokerError(
            f"{what}TLS failed ({_short(clue or text)}); correct security.protocol and ssl.* of the connection, or use"
            " the port that speaks TLS",
            may_pass=False,
        )
    return BrokerError(
        f"{what}cannot be reached or was lost ({_short(clue or text)}); check host, port, security.protocol and that it"
        " runs"
    )


def _short(text: str) -> str:
    """Leave out the addresses and times that the library puts around what it says."""
    return text.rpartition("]: ")[2][:300]
