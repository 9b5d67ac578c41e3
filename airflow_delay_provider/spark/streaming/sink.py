"""Writes the frames of one shard: deliveries, journal, rungs and dead letters, in Kafka transactions.

Each transaction also commits how far the shard has come, as the offset of a consumer group of its own: the number of
the micro-batch, and how many frames of it are written. So a micro-batch that Spark repeats, after a crash or in another
attempt of a task, continues where the last committed transaction ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    FENCED,
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
#: The longest pause for another writer of this shard that is alive.
MOST_PAUSE_SECONDS = 16.0
#: A message that failed is written alone then, and its next failure is a verdict. Of more failures at once, the others
#: wait again.
MOST_ALONE = 50
T = TypeVar("T")


class ShardWriter:
    """Writes the frames of one shard, exactly once for readers of committed records.

    Guarantees: the frames of a micro-batch are the same, and in the same order, whenever Spark repeats it. A
    transaction contains some of them and the number of those that are written. A new producer fences all earlier
    writers of this shard, and the number is read after that and before anything is written with it, so no two write the
    same frame. The number is kept by the broker for ``offsets.retention.minutes`` after the last one was committed;
    only a service that was killed between its last transaction and Spark's own commit, and is restarted after that
    time, writes those frames again.
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
        #: How many frames of this micro-batch are written, as far as is known since the producer was made.
        self._done = 0

    def write(self, frames: Iterable[Frame], batch: int) -> Written:
        """Write the frames of a micro-batch that are not written yet, and return what was written."""
        written, position = Written(), 0
        self._patiently(lambda: self._find_done(batch))
        for chunk in _chunks(frames):
            self._write_chunk(chunk, position, batch, written)
            position += len(chunk)
        return written

    def _write_chunk(self, chunk: Sequence[Frame], start: int, batch: int, written: Written) -> None:
        """Write the frames of a chunk that are not written yet; ``start`` is where it begins in the micro-batch."""
        refusals = Refusals()

        def attempt() -> bool:
            if self._producer is None:
                # Another writer, or an earlier attempt in spite of its error, may have committed more since.
                self._find_done(batch)
            return self._done >= start + len(chunk) or self._commit(chunk, start, batch, refusals, written)

        while not self._patiently(attempt):
            pass

    def _patiently(self, call: Callable[[], T]) -> T:
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, 0.0
        while True:
            try:
                return call()
            except (KafkaException, BrokerError) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise self._clients.failure(error, "writing due messages") from error
                if code_of(error) not in FENCED:
                    log.warning("%s: cannot write now, and tries again: %s", self._name, error)
                    time.sleep(PAUSE_SECONDS)
                    continue
                # A task on another executor wrote this shard since, as is usual: the first time needs no pause. Two
                # attempts that live at once would fence each other forever, so each gives the other more time.
                time.sleep(pause)
                pause = min(2 * pause or PAUSE_SECONDS, MOST_PAUSE_SECONDS)

    def close(self) -> None:
        """Drop the producer; the broker aborts an open transaction when the next one starts."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge(blocking=False)
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._clients.close_consumer(consumer)

    # -- the number of frames that are written -------------------------------------------------------------------

    def _find_done(self, batch: int) -> None:
        """Fence earlier writers, and learn how many frames of this micro-batch are written."""
        self._require_producer()
        (found,) = self._require_consumer().committed([self._marker(-1, "")], 10.0)
        service_id, _, count = (found.metadata or "").partition(" ")
        is_ours = service_id == self._service_id
        if is_ours and found.offset > batch:
            raise RuntimeError(f"micro-batch {batch} of {self._name} was written by another job; stop one of them")
        self._done = int(count) if is_ours and found.offset == batch else 0

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

    def _commit(self, chunk: Sequence[Frame], start: int, batch: int, refusals: Refusals, written: Written) -> bool:
        """Try to commit a transaction with the other frames; return False if the broker refuses messages."""
        producer, group = self._require_producer(), self._require_consumer().consumer_group_metadata()
        attempt = ShardTransaction(producer, self._facts, self._topology, floor_ms(self._clock.now()))
        try:
            attempt.fill(chunk, max(0, self._done - start), refusals.verdicts, refusals.alone)
        except RecordsRefusedError as refused:
            self._abort(producer)
            refusals.learn(refused.errors)
            self._facts.forget()
            return False
        done = start + len(chunk)
        marker = [self._marker(batch, f"{self._service_id} {done}")]
        call_until_done(lambda seconds: producer.send_offsets_to_transaction(marker, group, seconds))
        call_until_done(producer.commit_transaction)
        self._done = done
        attempt.count(written)
        return True

    def _abort(self, producer: Producer) -> None:
        try:
            call_until_done(producer.abort_transaction)
        except KafkaException as error:
            if code_of(error) in FENCED:
                raise
            # The broker may not know the transaction, if its first channel was deleted.
            self.close()


@dataclass(kw_only=True)
class Refusals:
    """What the broker has refused of the frames of one transaction, by their place in it."""

    verdicts: dict[int, ChannelCheck] = field(default_factory=dict)
    #: To be written alone in the next attempt.
    alone: set[int] = field(default_factory=set)

    def learn(self, errors: Mapping[int, KafkaError]) -> None:
        """Decide what the next attempt does with them: they are dead-lettered, or wait again, or are written alone."""
        for index, error in errors.items():
            if index in self.alone:
                self.verdicts[index] = check_of(error)
            elif len(self.alone) < MOST_ALONE:
                self.alone.add(index)
            else:
                # Perhaps it was only in a batch with others that are too large together.
                self.verdicts[index] = ChannelCheck(ChannelStatus.UNAVAILABLE, error.str())


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
