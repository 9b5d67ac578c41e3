"""The loop that dispatches the messages of a Kafka ladder: read, process, write, commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from airflow_delay_provider.brokers.kafka import admin, verify
from airflow_delay_provider.brokers.kafka.admin import LadderTopic
from airflow_delay_provider.brokers.kafka.client import KafkaClients, is_unreached
from airflow_delay_provider.brokers.kafka.dispatch.assignment import (
    Assignment,
    Backpressure,
    StallDetector,
    Trimmer,
    make_group_consumer,
)
from airflow_delay_provider.brokers.kafka.dispatch.channels import Channels
from airflow_delay_provider.brokers.kafka.dispatch.partition import Partition
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.brokers.kafka.dispatch.refusals import Isolation, RecordFailedError, is_of_record
from airflow_delay_provider.brokers.kafka.dispatch.transaction import (
    ChannelRefusedError,
    KafkaTransaction,
    open_transaction,
)
from airflow_delay_provider.brokers.kafka.reader import BATCH
from airflow_delay_provider.brokers.port import LadderDispatcher, OnDispatched
from airflow_delay_provider.domain.clock import Clock, floor_ms

log = logging.getLogger(__name__)

#: Steps of one partition before the next one is processed.
STEPS = 2000
#: The partitions may be assigned to another dispatcher by now.
_LOST = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_INSTANCE_ID,
}
#: Messages that are due within such a time are delivered together.
TOGETHER_SECONDS = 0.005


class KafkaLadderDispatcher(LadderDispatcher):
    """Serves the partitions that the consumer group assigns to it; any number of dispatchers run side by side.

    Exactly once for consumers that read committed records: the writes of a partition and its progress are one
    transaction. The transaction is bound to the membership in the group, so a dispatcher that lost its partitions
    without knowing it cannot commit. After any doubt, the state in memory is discarded and read again from the last
    commit.
    """

    def __init__(
        self,
        clients: KafkaClients,
        clock: Clock,
        *,
        instance: str | None = None,
        on_dispatched: OnDispatched | None = None,
    ) -> None:
        self._clients = clients
        self._topology = clients.config.topology
        self._clock = clock
        self._instance = instance
        self._name = instance or str(uuid4())
        self._on_dispatched = on_dispatched
        self._channels: Channels | None = None
        #: The topics of the ladder when it was opened, and which of them have unequal numbers of partitions.
        self._topics: Mapping[str, LadderTopic] = {}
        self._unequal: list[str] = []
        self._is_reading = False
        #: Index of the partition that is served first.
        self._first = 0
        self._isolation = Isolation()
        self._stalls = StallDetector()
        self._assignment = Assignment(clients)
        self._consumer: Consumer | None = None
        self._transaction: KafkaTransaction | None = None
        self._backpressure: Backpressure | None = None
        #: The membership with which the partitions were assigned. If read later, it could be empty, or a new one to
        #: which they do not belong.
        self._membership: Any = None
        self._trimmer = Trimmer(clients)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run_once(self) -> float:
        """Wait for work, do it, and commit when it is time."""
        consumer, transaction, channels = self._open()
        try:
            if self._is_ladder_changed():
                self._reopen()
                return 0.0
            self._is_reading = True
            self._read(consumer, self._pause(transaction))
            self._is_reading = False
            channels.refresh()
            self._advance(transaction)
            if self._is_time_to_commit(transaction):
                self._commit(transaction)
        except KafkaException as error:
            self._isolation.note_failure(error)
            self._recover(consumer, transaction, error)
        except RecordFailedError as error:
            self._isolation.note_defect(error)
            self._recover(consumer, transaction, error)
        except Exception:
            self._give_up()
            raise
        now_ms = floor_ms(self._clock.now())
        if self._backpressure is not None:
            self._backpressure.regulate(self._assignment.queues, now_ms)
        self._stalls.check(self._assignment.queues, now_ms)
        self._trimmer.trim()
        return 0.0

    @property
    def trouble(self) -> str | None:
        """Problems that need a person although the dispatcher continues."""
        wrong = [*self._stalls.found, *self._unequal]
        return "; ".join(wrong[:3]) or None

    def close(self) -> None:
        """Commit, and leave the group so that others take over; the group waits 10 s for a named dispatcher."""
        self._leave_group()
        # A broker that did not let us end a transaction does not answer this either.
        if self._transaction is not None and not self._transaction.is_open:
            self._trimmer.trim(now=True)
        self._give_up()
        if self._channels is not None:
            self._channels.close()
            self._channels = None

    def _read(self, consumer: Consumer, wait: float) -> None:
        """Fetch all available records, waiting only for the first one.

        Each call may assign and revoke partitions. It may then return records from before, so they are read again.
        """
        first = consumer.poll(wait)
        if first is None:
            return
        self._add(first)
        partitions = self._assignment.partitions
        records = consumer.consume(BATCH - 1, 0)
        if self._assignment.partitions is not partitions:
            self._load(consumer, consumer.assignment())
            return
        for record in records:
            self._add(record)

    def _pause(self, transaction: KafkaTransaction) -> float:
        """Return how long there is nothing to do."""
        ready_ms = self._assignment.next_ready_ms()
        until_ready = 1.0 if ready_ms is None else (ready_ms - self._clock.now().timestamp() * 1000) / 1000
        # Writes become visible when the transaction ends: a few moments together cost less than each alone.
        least = TOGETHER_SECONDS if transaction.is_open and until_ready > 0 else 0.0
        return max(0.0, min(max(until_ready, least), transaction.seconds_left(), 0.1))

    def _add(self, record: Message) -> None:
        error = record.error()
        if error is not None:
            raise self._clients.failure(error, "reading the ladder")
        queue = self._assignment.queues.get((record.topic(), record.partition()))
        if queue is not None:
            queue.add(Record.of(record, with_headers=not queue.hold_ms))

    def _advance(self, transaction: KafkaTransaction) -> None:
        """Deliver due messages of all partitions before processing more records; partitions take turns to be first."""
        partitions = [*self._assignment.partitions.values()]
        self._first = (self._first + 1) % max(1, len(partitions))
        partitions = partitions[self._first :] + partitions[: self._first]
        for step in (Partition.deliver_due, Partition.process_ready):
            for partition in partitions:
                self._do(step, partition, transaction)

    def _do(self, step: Callable[..., int], partition: Partition, transaction: KafkaTransaction) -> None:
        isolation = self._isolation
        limit = isolation.steps_left if isolation.is_careful else STEPS
        try:
            steps = step(partition, transaction, floor_ms(self._clock.now()), limit=limit)
            isolation.count(steps, partition.current)
        except KafkaException as error:
            if not is_of_record(error):
                raise
            raise RecordFailedError(partition.current, error) from error
        except Exception as error:
            raise RecordFailedError(partition.current, error) from error

    def _is_time_to_commit(self, transaction: KafkaTransaction) -> bool:
        if transaction.is_open:
            return transaction.seconds_left() <= 0 or not self._isolation.steps_left
        return self._assignment.has_progress()

    def _commit(self, transaction: KafkaTransaction) -> None:
        progress = self._assignment.progress()
        dispatched, lateness_ms = transaction.dispatched, transaction.lateness_ms
        transaction.commit(progress, self._membership)
        self._assignment.committed()
        self._isolation.note_commit()
        self._trimmer.note((topic, number, offset) for topic, number, offset, _ in progress)
        if lateness_ms and self._on_dispatched is not None:
            self._on_dispatched(dispatched, lateness_ms)

    # -- failures ------------------------------------------------------------------------------------------------

    def _recover(self, consumer: Consumer, transaction: KafkaTransaction, error: Exception) -> None:
        """Abort the transaction and repeat its work. If we cannot abort it, the broker does for the next producer."""
        inner = error.args[0] if isinstance(error, KafkaException) else None
        text = str(error) if inner is None else inner.str()
        log.warning("%s: the transaction is aborted and repeated: %s", self._clients.config.name, text)
        try:
            # Retriable calls were retried for as long as allowed, so a new producer is quicker. A producer that
            # reaches no node may never look for one again.
            is_lost = inner is not None and (inner.fatal() or inner.retriable() or is_unreached(error))
            if (is_lost and not isinstance(error, ChannelRefusedError)) or self._isolation.is_hopeless:
                raise error
            # Records in transit to us are not in memory, and the broker may have committed in spite of the error.
            is_group_lost = inner is not None and inner.code() in _LOST
            is_known = not (self._is_reading or transaction.is_committing or is_group_lost)
            self._abort(transaction)
            if is_known and self._assignment.partitions:
                self._assignment.roll_back(self._isolation)
                if self._channels is not None:
                    # A channel may have caused it.
                    self._channels.watch.refresh_now()
            else:
                self._load(consumer, consumer.assignment())
        except KafkaException as fatal:
            self._give_up()
            raise self._clients.failure(fatal, "a transaction of the dispatcher") from fatal
        except Exception:
            self._give_up()
            raise

    def _abort(self, transaction: KafkaTransaction) -> None:
        """Abort; if the broker does not know the transaction, replace the producer by one of the same name.

        That happens if the first channel of the transaction was deleted. Once the new producer has started, the old one
        cannot commit any more; the partitions and their records in memory are still ours.
        """
        try:
            transaction.abort()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.INVALID_TXN_STATE or self._channels is None:
                raise
            transaction.give_up()
            self._transaction = self._open_transaction(self._channels)

    def _try_abort(self, transaction: KafkaTransaction) -> None:
        """Abort while the group waits; if that fails now, it is repeated before the next step."""
        try:
            transaction.abort()
        except KafkaException as error:
            log.warning("%s: cannot abort the transaction yet: %s", self._clients.config.name, error.args[0].str())

    def _is_ladder_changed(self) -> bool:
        changed = [] if self._channels is None else self._channels.watch.find_ladder_changes(self._topics)
        # The watch may have looked before the ladder was completed.
        if not changed or admin.ladder_topics(self._clients) == self._topics:
            return False
        log.warning("%s: the ladder has changed (%s); reopening it", self._clients.config.name, ", ".join(changed[:5]))
        return True

    def _reopen(self) -> None:
        """Commit and start like a new dispatcher, which knows no records of topics that were created again."""
        self._isolation = Isolation()
        self._leave_group()
        self._give_up()

    def _leave_group(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            # This revokes the partitions, which commits their work.
            self._clients.close_consumer(consumer)

    def _give_up(self) -> None:
        """Discard everything; the next run starts like a new dispatcher and aborts the transaction left open."""
        transaction, self._transaction = self._transaction, None
        self._backpressure = None
        self._drop_partitions()
        if transaction is not None:
            transaction.give_up()
        self._leave_group()
        self._assignment.close()

    # -- clients and partitions ----------------------------------------------------------------------------------

    def _open(self) -> tuple[Consumer, KafkaTransaction, Channels]:
        if self._channels is None:
            self._channels = Channels.open(self._clients, self._name)
        if self._consumer is None or self._transaction is None:
            self._topics = verify.complete(self._clients)
            self._unequal = list(verify.find_unequal_partitions(self._topology, self._topics))
            verify.require_permitted(self._clients, self._topology)
            rungs = [name for name in self._topics if self._topology.hold_of(name) is not None]
            self._transaction = self._open_transaction(self._channels)
            self._consumer = make_group_consumer(self._clients, self._instance)
            self._consumer.subscribe(
                [self._topology.control, self._topology.inbox, *rungs],
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            self._backpressure = Backpressure(self._consumer)
        return self._consumer, self._transaction, self._channels

    def _open_transaction(self, channels: Channels) -> KafkaTransaction:
        return open_transaction(self._clients, self._name, channels)

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        self._membership = consumer.consumer_group_metadata()
        # Without a member id, the broker would accept commits of any client; the partitions are lost since.
        self._load(consumer, assigned if consumer.memberid() else [])
        numbers = sorted(self._assignment.partitions)
        log.info("%s: serving partitions %s", self._clients.config.name, numbers or "none")

    def _on_revoke(self, _consumer: Consumer, _revoked: list[TopicPartition]) -> None:
        if self._transaction is not None and self._assignment.partitions:
            try:
                self._commit(self._transaction)
            except KafkaException as error:
                log.warning("%s: the last transaction is aborted: %s", self._clients.config.name, error.args[0].str())
                self._try_abort(self._transaction)
        self._drop_partitions()

    def _on_lost(self, _consumer: Consumer, _lost: list[TopicPartition]) -> None:
        """Other dispatchers have the partitions already: nothing may be committed, not even by a new membership."""
        self._drop_partitions()
        if self._transaction is not None:
            self._try_abort(self._transaction)

    def _load(self, consumer: Consumer, assigned: Sequence[TopicPartition]) -> None:
        self._drop_partitions()
        self._assignment.load(
            consumer, assigned, topics=self._topics, isolation=self._isolation, transaction=self._transaction
        )

    def _drop_partitions(self) -> None:
        self._assignment.clear()
        if self._channels is not None:
            self._channels.forget_all()
        if self._backpressure is not None:
            self._backpressure.resume_all()
