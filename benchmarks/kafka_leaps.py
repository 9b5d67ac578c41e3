"""A dispatcher for which an hour passes in seconds, and the plain copy loop with which it is compared.

A clock that merely runs faster would distort the result: 100 ms of the dispatcher would count as a minute, and messages
would be late for their next rung and skip it. So time stands still here while there is work, and jumps to the end of
the hold time when all messages are in the rung: each message passes exactly the rungs of its delay, at the cost of real
time. Once the messages are due, time passes normally: their channel may have to be described first. Everything else is
production code, with three changes in the process that is measured:

- the moment at which a record was put into a rung, which the broker notes in real time, is that of the standing clock
  (the same arithmetic, on another number);
- records are fetched for any due time: real time hides the cost of fetching (it begins 4 s ahead), a jump would not;
- moves into rungs are counted (about 0.1 us each, which count against us).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.client import CONSUMER
from airflow_delay_provider.brokers.kafka.dispatch import assignment
from airflow_delay_provider.brokers.kafka.dispatch.loop import KafkaLadderDispatcher
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import SLACK_MS, PartitionQueue, Record
from airflow_delay_provider.brokers.kafka.header_protocol import Headers
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.ladder import Ladder
from benchmarks.kafka_node import STOP, config_of
from benchmarks.kafka_schedule import CONFIRMED
from benchmarks.measurement import MismatchError, expect

PARTITIONS_SERVED = "partitions"
#: Messages of one partition that all can be in memory before they are due.
MOST_IN_A_PARTITION = 20_000
#: How long there may be no progress.
STUCK_SECONDS = 60.0
#: Records of one transaction.
COMMIT_EVERY = 5_000
CONSUME = 1_000
LARGE_BUFFER = {"queue.buffering.max.messages": 1_000_000, "queue.buffering.max.kbytes": 1_000_000}


def rests_of(ladder: Ladder, delay_ms: int) -> list[int]:
    """Return the holds that a message rests for; what remains below the tick passes in the dispatcher's memory."""
    remaining, holds = delay_ms - SLACK_MS, list[int]()
    while hold := ladder.next_hold(remaining):
        holds.append(hold)
        remaining -= hold
    return holds


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Messages in the inbox that are all due at the same time."""

    start_ms: int
    delay_ms: int
    #: How many there are in each partition.
    by_partition: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """What a dispatcher did for the messages of its partitions."""

    dispatched: int
    rests: int
    #: On the machine's monotonic clock.
    ended_at: float
    cpu_seconds: float


class StandingClock:
    """A clock that is set, and stands still until it is started."""

    def __init__(self) -> None:
        self.at_ms = int(time.time() * 1000)
        self._started_at: float | None = None

    def set(self, at_ms: int) -> None:
        """Set it to a time, at which it stands still."""
        self.at_ms, self._started_at = at_ms, None

    def start(self, at_ms: int) -> None:
        """Let it run from a time on; it continues if it runs already."""
        if self._started_at is None:
            self.at_ms, self._started_at = at_ms, time.monotonic()

    def now(self) -> datetime:
        """Return its time."""
        since = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return from_ms(self.at_ms + int(since * 1000))


def run_leaping_dispatcher(pipe: Connection, settings: Mapping[str, Any]) -> None:
    """A dispatcher that reports its partitions, and its work for each batch that it is sent."""
    clock, counts = StandingClock(), {"dispatched": 0, "rests": 0}

    def on_dispatched(_channels: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        counts["dispatched"] += len(lateness_ms)

    _read_ahead_without_limit()
    with KafkaBroker(config_of(settings), clock=clock) as broker:
        dispatcher = broker.open_ladder_dispatcher(on_dispatched=on_dispatched)
        assert isinstance(dispatcher, KafkaLadderDispatcher)
        dispatcher.run_once()
        _count_rests(dispatcher, counts)
        while True:
            dispatcher.run_once()
            if not pipe.poll():
                continue
            try:
                heard = pipe.recv()
            except EOFError:
                break
            if heard == STOP:
                break
            if heard == PARTITIONS_SERVED:
                pipe.send(sorted(dispatcher._assignment.partitions))
            else:
                pipe.send(_process(pipe, dispatcher, clock, counts, heard, broker.topology.ladder))
        dispatcher.close()


def _process(
    pipe: Connection,
    dispatcher: KafkaLadderDispatcher,
    clock: StandingClock,
    counts: dict[str, int],
    batch: Batch,
    ladder: Ladder,
) -> Arrived:
    counts |= {"dispatched": 0, "rests": 0}
    n = sum(batch.by_partition[number] for number in dispatcher._assignment.partitions)
    if max(batch.by_partition) > MOST_IN_A_PARTITION:
        raise MismatchError(f"{max(batch.by_partition)} messages in a partition are too many to leap with")
    holds = rests_of(ladder, batch.delay_ms)
    clock.set(batch.start_ms)
    _note_rests(batch.start_ms, holds)
    left, cpu = list(holds), time.process_time()
    pipe.send("begin")
    seen, since = counts.copy(), time.monotonic()
    while counts["dispatched"] < n:
        dispatcher.run_once()
        if left:
            if counts["rests"] == n * (len(holds) - len(left) + 1):
                clock.set(clock.at_ms + left.pop(0))
        elif sum(len(each._due_soon) for each in dispatcher._assignment.partitions.values()) == n:
            clock.start(batch.start_ms + batch.delay_ms)
        if counts != seen:
            seen, since = counts.copy(), time.monotonic()
        elif time.monotonic() > since + STUCK_SECONDS:
            raise MismatchError(f"nothing moves any more: {counts} of {n} messages and {len(holds)} rests")
    return Arrived(
        dispatched=counts["dispatched"],
        rests=counts["rests"],
        ended_at=time.monotonic(),
        cpu_seconds=time.process_time() - cpu,
    )


def _read_ahead_without_limit() -> None:
    assignment.FAR_MS = assignment.NEAR_MS = 10**13


def _note_rests(start_ms: int, holds: Sequence[int]) -> None:
    """Let all records of a rung have been put there when the clock stood at the end of the rest before."""
    put_at, at = dict[int, int](), start_ms
    for hold in holds:
        if hold in put_at:
            raise MismatchError(f"messages rest twice in the rung of {hold} ms, which cannot be leapt over")
        put_at[hold] = at
        at += hold

    def hold_ends_ms(queue: PartitionQueue, _record: Record) -> int:
        return put_at.get(queue.hold_ms, 0) + queue.hold_ms

    PartitionQueue.hold_ends_ms = hold_ends_ms  # type: ignore[method-assign]


def _count_rests(dispatcher: KafkaLadderDispatcher, counts: dict[str, int]) -> None:
    transaction = dispatcher._transaction
    assert transaction is not None
    put_into_rung = transaction.put_into_rung

    def counted(partition: int, hold_ms: int, key: bytes, value: bytes) -> None:
        counts["rests"] += 1
        put_into_rung(partition, hold_ms, key, value)

    transaction.put_into_rung = counted  # type: ignore[method-assign]


class Filling:
    """Records in a transaction that is open: written, and seen by no reader until :meth:`show`."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": uuid4().hex, **LARGE_BUFFER})
        self._producer.init_transactions(30)

    def write(self, topic: str, records: Iterable[tuple[bytes | None, bytes, int, Headers | None]]) -> None:
        """Write records: key, value, partition, headers."""
        self._producer.begin_transaction()
        for key, value, partition, headers in records:
            self._producer.produce(topic, value, key, partition, **({"headers": headers} if headers else {}))
            self._producer.poll(0)
        expect("records that could not be written", self._producer.flush(60), 0)

    def show(self) -> float:
        """Let readers see them, and return the moment before that."""
        begin = time.monotonic()
        self._producer.commit_transaction(30)
        return begin


def copy(pipe: Connection, bootstrap: str, source: str, target: str, records: int, with_headers: bool) -> None:
    """Consume, produce, commit, every 5000 records one transaction: the least work that is exactly once."""
    group = f"bench-{uuid4().hex[:8]}"
    # Reading ahead as far as the dispatcher does.
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, **CONSUMER, "group.id": group, "queued.max.messages.kbytes": 65_536}
    )
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            **CONFIRMED,
            "transactional.id": group,
            "queue.buffering.max.messages": 500_000,
        }
    )
    producer.init_transactions(30)
    assigned: list[TopicPartition] = []
    consumer.subscribe([source], on_assign=lambda _, partitions: assigned.extend(partitions))
    while not assigned:
        consumer.poll(0.1)
    pipe.send("begin")
    cpu = time.process_time()
    copied = _copy(consumer, producer, target, records, with_headers=with_headers)
    pipe.send(Arrived(dispatched=copied, rests=0, ended_at=time.monotonic(), cpu_seconds=time.process_time() - cpu))
    consumer.close()


def _copy(consumer: Consumer, producer: Producer, target: str, records: int, *, with_headers: bool) -> int:
    copied = 0
    while copied < records:
        offsets, begun = dict[tuple[str, int], int](), 0
        producer.begin_transaction()
        while begun < min(COMMIT_EVERY, records - copied):
            for record in consumer.consume(min(CONSUME, COMMIT_EVERY - begun), 0.05):
                if record.error() is not None:
                    raise KafkaException(record.error())
                if with_headers:
                    producer.produce(target, record.value(), record.key(), headers=record.headers())
                else:
                    producer.produce(target, record.value(), record.key())
                offsets[record.topic(), record.partition()] = record.offset() + 1
                begun += 1
            producer.poll(0)
        places = [TopicPartition(*position, offset) for position, offset in offsets.items()]
        producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), 30)
        producer.commit_transaction(30)
        copied += begun
    return copied
