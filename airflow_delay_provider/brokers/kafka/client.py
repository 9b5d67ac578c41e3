"""Clients of one Kafka connection, and the errors of this package for those of the library."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.domain.exceptions import (
    BrokerError,
    ConfigurationError,
    DelayError,
    PayloadError,
    Reach,
    UnknownChannelError,
)

#: The longest that a request to the broker may take.
ASK_SECONDS = 15.0
#: The node has left the cluster, or seemed to for a moment; older libraries have no name for it.
NODE_LEFT = -137
BATCH_BYTES = 262_144
#: How long a call of a transaction may take, and how much longer before it is abandoned.
CALL_SECONDS = 10.0
GRACE_SECONDS = 2.0
#: A dispatcher that is gone for so long loses its partitions, and the broker aborts its open transaction.
GONE_SECONDS = 10
#: As safe as the broker can make it; small batches fit into channels whose max.message.bytes is small.
PRODUCER = {
    "acks": "all",
    "enable.idempotence": True,
    # The same partition for a key as Java's clients choose.
    "partitioner": "murmur2_random",
    "batch.size": BATCH_BYTES,
    "message.max.bytes": 100_000_000,
    "delivery.report.only.error": True,
    "topic.metadata.propagation.max.ms": 2000,
}
CONSUMER = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    "auto.offset.reset": "earliest",
    # With the default of a second, a reader that has caught up would pause that long.
    "fetch.queue.backoff.ms": 10,
    "fetch.wait.max.ms": 100,
}
#: The topic does not exist.
MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
#: The login may not do it.
DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
#: The record cannot be stored by any client.
UNFIT = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
}
LOGIN = {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED}
_TLS = {KafkaError._SSL, KafkaError._CRIT_SYS_RESOURCE}
_PASSING = {
    KafkaError._TRANSPORT,
    NODE_LEFT,
    KafkaError._WAIT_COORD,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_CONTROLLER,
    KafkaError.REQUEST_TIMED_OUT,
}
_MOVED = {
    KafkaError._NOENT,
    KafkaError._TIMED_OUT,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}


class KafkaClients:
    """The clients of one connection, created when first needed and closed together. Not thread-safe."""

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        #: The last connection error that the library reported; errors of calls are often mere timeouts.
        self.last_failure: str | None = None
        self._admin: AdminClient | None = None
        self._producer: Producer | None = None
        self._consumers: list[Consumer] = []

    @property
    def ask_seconds(self) -> float:
        """How long a request to the broker may take, with all attempts."""
        return min(ASK_SECONDS, max(1.0, self.config.confirm_seconds))

    @property
    def try_seconds(self) -> float:
        """How long one attempt may take: its node may be gone, and the next attempt uses another."""
        return min(5.0, self.ask_seconds)

    def admin(self) -> AdminClient:
        """Return the admin client."""
        if self._admin is None:
            self._admin = self._make(AdminClient, {})
        return self._admin

    def producer(self) -> Producer:
        """Return the producer without transactions."""
        if self._producer is None:
            timeout_ms = max(1000, round(self.config.confirm_seconds * 1000))
            self._producer = self._make(Producer, PRODUCER | {"message.timeout.ms": timeout_ms})
        return self._producer

    def forget_producer(self) -> None:
        """Drop the producer and its records in transit; the next call makes a new one."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None

    def make_producer(self, settings: Mapping[str, Any]) -> Producer:
        """Return a new producer for the caller alone."""
        producer: Producer = self._make(Producer, PRODUCER | dict(settings))
        return producer

    def make_consumer(self, settings: Mapping[str, Any] | None = None) -> Consumer:
        """Return a new consumer, closed with these clients; without a group it reads assigned partitions."""
        group = {"group.id": f"{self.config.consumer_group}.reader"}
        consumer: Consumer = self._make(Consumer, CONSUMER | group | dict(settings or {}))
        self._consumers.append(consumer)
        return consumer

    def close_consumer(self, consumer: Consumer) -> None:
        """Close a consumer before the other clients."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)
        consumer.close()

    def close(self) -> None:
        """Close all clients."""
        while self._consumers:
            self._consumers.pop().close()
        if self._producer is not None:
            self._producer.flush(self.config.confirm_seconds)
            self._producer = None
        self._admin = None

    # -- asking --------------------------------------------------------------------------------------------------

    def ask(self, question: Callable[[], Any], doing: str, *, seconds: float | None = None) -> Any:
        """Return the broker's answer; errors that may pass are retried for a while."""
        try:
            return self.ask_again(question, seconds=seconds)
        except KafkaException as error:
            raise self.failure(error, doing) from error

    def ask_again(self, question: Callable[[], Any], *, seconds: float | None = None) -> Any:
        """Do the same, and raise the library's error."""
        deadline = time.monotonic() + (seconds or self.ask_seconds)
        while True:
            try:
                answer = question()
            except KafkaException as error:
                inner = error.args[0]
                may_pass = isinstance(inner, KafkaError) and (inner.retriable() or inner.code() in _PASSING | _MOVED)
                if not may_pass or time.monotonic() > deadline:
                    raise
                if inner.code() in _MOVED:
                    self.look_for_leaders()
            else:
                self.last_failure = None
                return answer
            time.sleep(0.02)

    def look_for_leaders(self) -> None:
        """Refresh the leaders of partitions; the library keeps outdated ones after a node was lost."""
        try:
            self.admin().list_topics(timeout=self.try_seconds)
        except KafkaException:
            self._forget_admin()

    def failure(self, error: BaseException | KafkaError, doing: str = "") -> DelayError:
        """Return the error of this package."""
        for client in (self._admin, self._producer):
            # The library reports connection errors when it is polled.
            if client is not None:
                client.poll(0)
        if is_unreached(error):
            self._forget_admin()
            self.forget_producer()
        return translate(error, self.config, doing=doing, clue=self.last_failure if is_unreached(error) else None)

    def _forget_admin(self) -> None:
        """Drop the admin client: one that lost all nodes for a moment may never reconnect (librdkafka issue 5301)."""
        if self._admin is not None:
            self._admin.poll(0)
            self._admin = None

    def _make(self, kind: Any, settings: Mapping[str, Any]) -> Any:
        quiet = {"error_cb": self._note_failure, "logger": _quiet(), "log.connection.close": False}
        own = {"client.id": "airflow-delay-provider", "allow.auto.create.topics": False} if kind is Consumer else {}
        try:
            return kind({**own, **self.config.client, **settings, **quiet})
        except KafkaException as error:
            raise ConfigurationError(
                f"{self.config.name}: {error.args[0].str()}; correct the connection's extra"
            ) from error
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self.config.name}: {error}; correct the connection's extra") from error

    def _note_failure(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last_failure = error.str()


def is_unreached(error: BaseException | KafkaError) -> bool:
    """Whether the error only says that no node has answered."""
    inner = error.args[0] if isinstance(error, KafkaException) else error
    return isinstance(inner, KafkaError) and inner.code() in {
        KafkaError._TRANSPORT,
        NODE_LEFT,
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._WAIT_COORD,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._PURGE_QUEUE,
    }


def _quiet() -> logging.Logger:
    """Return a logger for the library's own messages, silent unless its level is set.

    The library reports every failed attempt to connect, many a second while a broker is down.
    """
    logger = logging.getLogger("airflow_delay_provider.kafka.client")
    logger.setLevel(logging.CRITICAL if logger.level == logging.NOTSET else logger.level)
    return logger


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
    """Return the error of this package for one of the client library; neither contains secrets.

    :param clue: the last connection error of the library, if the error itself is a mere timeout.
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
    if code == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
        others = "dispatchers of another kind (plain, or on Spark) serve"
        return BrokerError(f"{config.name}: {others} {config.topology.prefix}; stop them, and this one continues")
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
    """Remove the addresses and times that the library adds."""
    return text.rpartition("]: ")[2][:300]


def call_until_done(call: Callable[[float], Any]) -> None:
    """Retry a call while the library says that it can be retried, for as long as a transaction may take."""
    deadline = time.monotonic() + CALL_SECONDS
    while True:
        try:
            _call_in_thread(call, max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise
        else:
            return


def _call_in_thread(call: Callable[[float], Any], seconds: float) -> None:
    """Make a call that may not return, in a thread that is abandoned then.

    If the coordinator of the group is lost, the library waits for it without regard to the timeout (librdkafka issue
    5511). All dispatchers would wait with it, since a rebalance needs all members.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            ended.set_result(call(seconds))
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            ended.set_exception(error)

    threading.Thread(target=run, name="delay-kafka-call", daemon=True).start()
    try:
        ended.result(seconds + GRACE_SECONDS)
    except TimeoutError:
        error = KafkaError(KafkaError._TIMED_OUT, "the client library does not return", fatal=True)
        raise KafkaException(error) from None
