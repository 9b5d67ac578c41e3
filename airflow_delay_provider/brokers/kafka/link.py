"""The clients of one connection: made when they are first needed, and let go together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.errors import translate
from airflow_delay_provider.exceptions import ConfigurationError, DelayError

#: How long a question to the broker may take at most.
ASK_SECONDS = 15.0
#: The node that was asked has left the cluster, or seemed to for a moment; older libraries have no name for it.
NODE_LEFT = -137

BATCH_BYTES = 262_144
#: As safe as the broker can make it; small batches fit into channels whose max.message.bytes is small.
PRODUCER = {
    "acks": "all",
    "enable.idempotence": True,
    # Where Java's clients put a key, so do we.
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
    # The default of a second is how long a reader that has caught up would stand still.
    "fetch.queue.backoff.ms": 10,
    "fetch.wait.max.ms": 100,
}


class Link:
    """What a broker's parts use to talk to Kafka. Not for several threads at once."""

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        #: What the library last said of connections that fail; the errors of calls often tell only that time ran out.
        self.last_failure: str | None = None
        self._admin: AdminClient | None = None
        self._producer: Producer | None = None
        self._consumers: list[Consumer] = []

    @property
    def ask_seconds(self) -> float:
        """How long a question to the broker may take."""
        return min(ASK_SECONDS, max(1.0, self.config.confirm_seconds))

    @property
    def try_seconds(self) -> float:
        """How long one attempt may take: the node that is asked may be gone, and the next one be another."""
        return min(5.0, self.ask_seconds)

    def admin(self) -> AdminClient:
        """Return the client that asks and creates."""
        if self._admin is None:
            self._admin = self._make(AdminClient, {})
        return self._admin

    def producer(self) -> Producer:
        """Return the producer whose records are confirmed one by one."""
        if self._producer is None:
            timeout_ms = max(1000, round(self.config.confirm_seconds * 1000))
            self._producer = self._make(Producer, PRODUCER | {"message.timeout.ms": timeout_ms})
        return self._producer

    def forget_producer(self) -> None:
        """Let the next call make a new producer; records that are still on their way are given up."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None

    def make_producer(self, settings: Mapping[str, Any]) -> Producer:
        """Return a producer of the caller's own."""
        producer: Producer = self._make(Producer, PRODUCER | dict(settings))
        return producer

    def make_consumer(self, settings: Mapping[str, Any] | None = None) -> Consumer:
        """Return a consumer, closed with the link. One that has no group reads what it is assigned."""
        group = {"group.id": f"{self.config.consumer_group}.reader"}
        consumer: Consumer = self._make(Consumer, CONSUMER | group | dict(settings or {}))
        self._consumers.append(consumer)
        return consumer

    def close_consumer(self, consumer: Consumer) -> None:
        """Close a consumer before the link is."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)
        consumer.close()

    def close(self) -> None:
        """Let go of everything."""
        while self._consumers:
            self._consumers.pop().close()
        if self._producer is not None:
            self._producer.flush(self.config.confirm_seconds)
            self._producer = None
        self._admin = None

    # -- asking --------------------------------------------------------------------------------------------------

    def ask(self, question: Callable[[], Any], doing: str, *, seconds: float | None = None) -> Any:
        """Return the broker's answer; what may pass is asked again for a while."""
        try:
            return self.ask_again(question, seconds=seconds)
        except KafkaException as error:
            raise self.failure(error, doing) from error

    def ask_again(self, question: Callable[[], Any], *, seconds: float | None = None) -> Any:
        """Do the same, and leave the library's error to the caller."""
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
        """Ask which node has which partition; the library goes on believing what it was told before one was lost."""
        try:
            self.admin().list_topics(timeout=self.try_seconds)
        except KafkaException:
            self._forget_admin()

    def failure(self, error: BaseException | KafkaError, doing: str = "") -> DelayError:
        """Return the error of this package."""
        for client in (self._admin, self._producer):
            # What the library says of connections is told when it is asked for.
            if client is not None:
                client.poll(0)
        if is_unreached(error):
            self._forget_admin()
            self.forget_producer()
        return translate(error, self.config, doing=doing, clue=self.last_failure if is_unreached(error) else None)

    def _forget_admin(self) -> None:
        """Ask with a new client: one that has heard of no node for a moment may look for none any more.

        That is librdkafka's issue 5301.
        """
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


def is_unreached(error: BaseException | KafkaError) -> bool:
    """Whether all that is known is that no node has answered."""
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
    """The library's own words, which would go to standard error: kept for those who ask for them.

    It tells of every attempt to connect as an error, many a second while a broker is down.
    """
    logger = logging.getLogger("airflow_delay_provider.kafka.client")
    logger.setLevel(logging.CRITICAL if logger.level == logging.NOTSET else logger.level)
    return logger
