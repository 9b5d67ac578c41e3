"""Writes the frames of one shard: deliveries, journal, rungs and dead letters, in Kafka transactions.

Each transaction also commits how far the shard has come, as the offset of a consumer group of its own: the number of
the micro-batch, and how many frames of it are written. So a micro-batch that Spark repeats, after a crash or in another
attempt of a task, continues where the last committed transaction ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from airflow_delay_provider.brokers.kafka.client import KafkaClients, call_until_done, code_of
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import ChannelCheck, ChannelStatus, check_of
from airflow_delay_provider.domain.clock import SystemClock, floor_ms
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.spark.streaming.channel_facts import ChannelFacts
from airflow_delay_provider.spark.streaming.frames import Frame
from airflow_delay_provider.spark.streaming.transaction import (
    TRANSACTION_MS,
    RecordsRefusedError,
    ShardTransaction,
    Written,
)

log = logging.getLogger(__name__)

#: Most frames and bytes in one transaction.
MOST_FRAMES = 10_000
MOST_BYTES = 8_000_000
#: How long a shard is written again while the broker does not answer. Then the task fails.
PATIENCE_SECONDS = 120.0
PAUSE_SECONDS = 0.5
#: A message that failed is written alone then, and its next failure is a verdict. Of more failures at once, the others
#: wait again.
MOST_ALONE = 50
_FENCED = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
T = TypeVar("T")


class ShardWriter:
    """Writes the frames of one shard, exactly once for readers of committed records.

    Guarantees: the frames of a micro-batch are the same, and in the same order, whenever Spark repeats it. A
    transaction contains some of them and the number of those that are written. A writer starts by fencing all earlier
    writers of this shard and then reads that number, so no two write the same frame. The number is kept by the broker
    for ``offsets.retention.minutes`` after the last one was committed; only a service that was killed between its last
    transaction and Spark's own commit, and is restarted after that time, writes those frames again.
    """

    def __init__(self, config: KafkaConfig, service_id: str, shard: int) -> None:
        self._clients = KafkaClients(config)
        self._topology = config.topology
        self._service_id = service_id
        self._name = f"{config.topology.prefix}.spark.{shard}"
        self._facts = ChannelFacts(self._clients)
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._clock = SystemClock()
        #: Whether the last transaction may have been committed in spite of an error.
        self._is_doubtful = False

    def write(self, frames: Iterable[Frame], batch: int) -> Written:
        """Write the frames of a micro-batch that are not written yet, and return what was written."""
        written, position = Written(), 0
        done = self._patiently(lambda: self._find_done(batch))
        for chunk in _chunks(frames):
            start, position = position, position + len(chunk)
            if position > done:
                self._write_chunk(chunk, start, batch, max(0, done - start), written)
        return written

    def _write_chunk(self, chunk: Sequence[Frame], start: int, batch: int, skip: int, written: Written) -> None:
        def attempt() -> None:
            # An earlier attempt may have been committed in spite of its error.
            done = max(start + skip, self._find_done(batch) if self._is_doubtful else 0)
            self._is_doubtful = False
            if done < start + len(chunk):
                self._commit(chunk[done - start :], batch, start + len(chunk), written)

        self._patiently(attempt)

    def _patiently(self, call: Callable[[], T]) -> T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return call()
            except (KafkaException, BrokerError) as error:
                self.close()
                self._is_doubtful = True
                if time.monotonic() > deadline:
                    raise self._clients.failure(error, "writing due messages") from error
                if code_of(error) in _FENCED:
                    # A task on another executor wrote this shard since, as is usual.
                    continue
                log.warning("%s: cannot write now, and tries again: %s", self._name, error)
                time.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        """Drop the producer; the broker aborts an open transaction when the next one starts."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge(blocking=False)
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._clients.close_consumer(consumer)

    # -- the number of frames that are written -------------------------------------------------------------------

    def _find_done(self, batch: int) -> int:
        """Fence earlier writers, and return how many frames of this micro-batch are written."""
        self._require_producer()
        (found,) = self._require_consumer().committed([self._marker(-1, "")], 10.0)
        service_id, _, count = (found.metadata or "").partition(" ")
        if service_id != self._service_id or found.offset < batch:
            return 0
        if found.offset > batch:
            raise RuntimeError(f"micro-batch {batch} of {self._name} was written by another job; stop one of them")
        return int(count)

    def _marker(self, batch: int, metadata: str) -> TopicPartition:
        return TopicPartition(self._topology.journal, 0, batch, metadata)

    def _require_producer(self) -> Producer:
        if self._producer is None:
            producer = self._clients.make_producer(
                {
                    "transactional.id": self._name,
                    "transaction.timeout.ms": TRANSACTION_MS,
                    "message.timeout.ms": TRANSACTION_MS,
                    "retry.backoff.ms": 5,
                    "retry.backoff.max.ms": 500,
                    "linger.ms": 5,
                    "queue.buffering.max.messages": 500_000,
                }
            )
            producer.list_topics(self._topology.journal, 5.0)
            producer.init_transactions(30.0)
            self._producer = producer
        return self._producer

    def _require_consumer(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self._clients.make_consumer({"group.id": self._name})
        return self._consumer

    # -- one transaction -----------------------------------------------------------------------------------------

    def _commit(self, chunk: Sequence[Frame], batch: int, done: int, written: Written) -> None:
        """Commit a transaction with these frames; messages that the broker refuses are dead-lettered or wait again."""
        verdicts: dict[int, ChannelCheck] = {}
        alone: set[int] = set()
        while True:
            attempt = ShardTransaction(
                self._require_producer(), self._facts, self._topology, floor_ms(self._clock.now())
            )
            try:
                attempt.fill(chunk, verdicts, alone)
            except RecordsRefusedError as refused:
                self._abort()
                self._facts.forget()
                for index, error in refused.errors.items():
                    if index in alone:
                        verdicts[index] = check_of(error)
                    elif len(alone) < MOST_ALONE:
                        alone.add(index)
                    else:
                        # Perhaps it was only in a batch with others that are too large together.
                        verdicts[index] = ChannelCheck(ChannelStatus.UNAVAILABLE, error.str())
                continue
            break
        producer, group = self._require_producer(), self._require_consumer().consumer_group_metadata()
        marker = [self._marker(batch, f"{self._service_id} {done}")]
        call_until_done(lambda seconds: producer.send_offsets_to_transaction(marker, group, seconds))
        call_until_done(producer.commit_transaction)
        attempt.count(written)

    def _abort(self) -> None:
        try:
            call_until_done(self._require_producer().abort_transaction)
        except KafkaException:
            # The broker may not know the transaction, if its first channel was deleted.
            self.close()


def _chunks(frames: Iterable[Frame]) -> Iterator[list[Frame]]:
    """Return the frames of one transaction after the other."""
    chunk, size = list[Frame](), 0
    for frame in frames:
        more = len(frame.value or b"") + 100
        if chunk and (len(chunk) >= MOST_FRAMES or size + more > MOST_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(frame)
        size += more
    if chunk:
        yield chunk
