"""The driver's membership in the group of dispatchers: at any time, one kind of dispatcher serves a ladder.

Plain dispatchers and this one name different strategies for the assignment of partitions, and a broker lets nobody join
a group that has no strategy in common with it. The progress that is committed here names the service, and a plain
dispatcher refuses such a ladder also while no driver runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from queue import Queue
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from airflow_delay_provider.brokers.kafka.admin import LadderTopic
from airflow_delay_provider.brokers.kafka.client import DENIED, GONE_SECONDS, KafkaClients, code_of
from airflow_delay_provider.brokers.kafka.reader import PartitionId
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError

log = logging.getLogger(__name__)

#: Plain dispatchers use "range".
STRATEGY = "roundrobin"
#: A killed dispatcher is a member for so long.
JOIN_SECONDS = 4 * GONE_SECONDS
#: For so long, partitions may be missing after other members came or went.
REBALANCE_SECONDS = 3 * GONE_SECONDS
POLL_SECONDS = 0.1
CALL_SECONDS = 30.0


class Membership:
    """A member of the group that is assigned all partitions, or none of use."""

    def __init__(self, clients: KafkaClients, topics: Mapping[str, LadderTopic]) -> None:
        self._clients = clients
        self._topology = clients.config.topology
        names = [name for name in topics if self._is_read(name)]
        #: All partitions of the topics in which messages wait.
        self.partitions: list[PartitionId] = [
            (name, number) for name in names for number in range(topics[name].partitions)
        ]
        self._names = names
        self._assigned: set[PartitionId] = set()
        self._incomplete_since = time.monotonic()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        #: What the thread is to do with the consumer, which it alone uses: a call would wait for its poll otherwise.
        self._calls: Queue[tuple[Callable[[Consumer], Any], Future[Any]]] = Queue()
        self._thread = threading.Thread(target=self._run, name="delay-spark-membership", daemon=True)

    def join(self) -> None:
        """Become the only member; wait for members that are gone, and refuse a ladder that others serve."""
        deadline = time.monotonic() + JOIN_SECONDS
        while (others := self._find_others()) is not None:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"{self._clients.config.name}: {others} already serves the ladder {self._topology.prefix}; stop it"
                    " first, because each message must be dispatched once"
                )
            time.sleep(1.0)
        self._thread.start()
        while not self._is_complete:
            if self._error is not None:
                self.close()
                raise self._clients.failure(self._error, "joining the dispatchers") from self._error
            if time.monotonic() > deadline + REBALANCE_SECONDS:
                self.close()
                raise ConfigurationError(
                    f"{self._clients.config.name}: another dispatcher joined the ladder {self._topology.prefix} at the"
                    " same time; start only one"
                )
            time.sleep(0.05)

    def require(self) -> None:
        """Refuse to continue if others may serve the ladder by now."""
        if self._error is not None:
            raise self._clients.failure(self._error, "the membership in the group of dispatchers") from self._error
        if not self._is_complete and time.monotonic() > self._incomplete_since + REBALANCE_SECONDS:
            raise BrokerError(
                f"{self._clients.config.name}: this job is no member of the dispatchers of {self._topology.prefix} any"
                " more (the broker was gone for too long, or another dispatcher has joined); it stops, so that no two"
                " serve the ladder"
            )

    def committed(self) -> list[TopicPartition]:
        """Return the committed progress of all partitions."""
        question = [TopicPartition(*each) for each in self.partitions]
        found: list[TopicPartition] = self._clients.ask(
            lambda: self._call(lambda consumer: consumer.committed(question, 10.0)),
            "reading the progress",
            seconds=60.0,
        )
        return found

    def commit(self, offsets: Iterable[tuple[str, int, int, str]]) -> None:
        """Commit progress (topic, partition, offset, note) as this member, all or nothing."""
        wanted = [TopicPartition(topic, partition, offset, note) for topic, partition, offset, note in offsets]
        if wanted:
            answer = self._clients.ask(
                lambda: self._call(lambda consumer: consumer.commit(offsets=wanted, asynchronous=False)),
                "committing the progress",
            )
            for each in answer:
                if each.error is not None:
                    raise self._clients.failure(each.error, "committing the progress")

    def close(self) -> None:
        """Leave the group."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(GONE_SECONDS)

    # -- pieces --------------------------------------------------------------------------------------------------

    def _is_read(self, topic: str) -> bool:
        return topic in (self._topology.inbox, self._topology.control) or self._topology.hold_of(topic) is not None

    @property
    def _is_complete(self) -> bool:
        return self._assigned == set(self.partitions)

    def _call(self, call: Callable[[Consumer], Any]) -> Any:
        """Let the thread do something with the consumer."""
        done: Future[Any] = Future()
        self._calls.put((call, done))
        try:
            return done.result(CALL_SECONDS)
        except TimeoutError:
            raise BrokerError(f"{self._clients.config.name}: this job is no member of the dispatchers") from None

    def _find_others(self) -> str | None:
        """Describe the members of the group; None if there are none."""
        group = self._topology.dispatch_group

        def ask() -> Any:
            asked = self._clients.admin().describe_consumer_groups([group], request_timeout=self._clients.try_seconds)
            return asked[group].result()

        try:
            seen = self._clients.ask_again(ask)
        except KafkaException as error:
            if code_of(error) in (KafkaError.GROUP_ID_NOT_FOUND, *DENIED):
                return None
            raise self._clients.failure(error, "looking for dispatchers") from error
        if not seen.members:
            return None
        # While members join, the strategy is not decided.
        kind = {STRATEGY: "a job on Spark", "range": "the plain dispatcher"}.get(seen.partition_assignor)
        return kind or "another dispatcher"

    def _make_consumer(self) -> Consumer:
        consumer = self._clients.make_consumer(
            {
                "group.id": self._topology.dispatch_group,
                "partition.assignment.strategy": STRATEGY,
                "session.timeout.ms": GONE_SECONDS * 1000,
                "max.poll.interval.ms": 60_000,
                "heartbeat.interval.ms": 2000,
                "queued.min.messages": 1,
            }
        )
        consumer.subscribe(self._names, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke)
        return consumer

    def _run(self) -> None:
        consumer = self._make_consumer()
        try:
            while not self._stop.is_set():
                self._note(consumer.poll(POLL_SECONDS))
                self._answer(consumer)
        except Exception as error:  # noqa: BLE001 - raised where the job asks for its membership
            self._error = error
        finally:
            self._clients.close_consumer(consumer)

    def _answer(self, consumer: Consumer) -> None:
        while not self._calls.empty():
            call, done = self._calls.get()
            try:
                done.set_result(call(consumer))
            except Exception as error:  # noqa: BLE001 - raised where the call is waited for
                done.set_exception(error)

    def _note(self, record: Message | None) -> None:
        """Spark reads the records, so nothing is fetched here; only errors of the membership matter."""
        error = None if record is None else record.error()
        if error is not None and (error.fatal() or error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL):
            self._error = KafkaException(error)
        elif error is not None:
            log.warning("%s: %s", self._clients.config.name, error.str())

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        unread = [TopicPartition(each.topic, each.partition, OFFSET_END) for each in assigned]
        consumer.assign(unread)
        if unread:
            consumer.pause(unread)
        self._change({(each.topic, each.partition) for each in assigned})

    def _on_revoke(self, _consumer: Consumer, _revoked: list[TopicPartition]) -> None:
        self._change(set())

    def _change(self, assigned: set[PartitionId]) -> None:
        if self._is_complete:
            self._incomplete_since = time.monotonic()
        self._assigned = assigned
