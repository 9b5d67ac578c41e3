"""Receiving messages and settling them.

Consumers of one channel share its partitions, as a consumer group. A message that was received and not settled is
delivered again when its consumer is gone. Messages are settled one by one, so a slow one does not block others, and a
settled one is not delivered again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from airflow_delay_provider.brokers.kafka import admin, header_protocol
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.progress import Progress, progress_of
from airflow_delay_provider.brokers.kafka.reader import PartitionId, Reader, log_starts, stable_ends, take
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import LifecycleError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Delivery, GivenUp, Message

#: How long joining a group may take.
JOIN_SECONDS = 20.0
#: How long fetching available messages may take.
FETCH_SECONDS = 10.0
#: Settled messages are committed at least so often while others are held.
COMMIT_SECONDS = 1.0
SHORTEST_POLL_INTERVAL = timedelta(minutes=5)
LONGEST_POLL_INTERVAL = timedelta(days=1)
_LOST = {KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS}


class Receiver:
    """The subscriptions of one client."""

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._subscriptions: dict[str, _Subscription] = {}

    def receive(self, channel: str, limit: int, visibility: timedelta) -> list[Delivery]:
        """Return available messages."""
        subscription = self._subscriptions.get(channel)
        if subscription is None:
            admin.require_channel(self._clients, channel)
            subscription = self._subscriptions[channel] = _Subscription(self._clients, channel, visibility)
        return subscription.receive(limit)

    def peek(self, channel: str, limit: int) -> list[Message]:
        """Return the next messages without receiving them, and without joining the group."""
        if channel in self._subscriptions:
            return self._subscriptions[channel].peek(limit)
        return [delivery.message for delivery in islice(self.browse(channel), limit)]

    def browse(self, channel: str) -> Iterator[Delivery]:
        """Return unsettled messages one by one, without joining the group; they cannot be settled."""
        partitions = [(channel, number) for number in range(admin.require_channel(self._clients, channel).partitions)]
        reader = Reader(self._clients, group=group_of(self._clients, channel))
        try:
            yield from self._browse(reader, partitions)
        finally:
            reader.close()

    def _browse(self, reader: Reader, partitions: Sequence[PartitionId]) -> Iterator[Delivery]:
        requested = [TopicPartition(*each) for each in partitions]
        starts = log_starts(self._clients, requested)
        ends = stable_ends(self._clients, requested)
        progress = {
            (each.topic, each.partition): progress_of(each, starts)
            for each in reader.committed(partitions, seconds=FETCH_SECONDS)
        }
        begin = {where: each.low for where, each in progress.items()}
        for record in reader.read_between(begin, ends):
            if progress[record.topic(), record.partition()].is_waiting(record.offset()):
                yield _delivery(record, "")

    def ack(self, delivery: Delivery) -> None:
        """Settle a message."""
        self._holder_of(delivery).settle(delivery)

    def give_back(self, delivery: Delivery, delay: timedelta) -> None:
        """Release a message, to deliver it again after a while, here or to another consumer if we are gone by then."""
        self._holder_of(delivery).take_back(delivery, delay)

    def is_dead_letter(self, delivery: Delivery) -> bool:
        """Whether the message came from a dead-letter channel."""
        return self._holder_of(delivery).is_dead_letter(delivery)

    def require_held(self, delivery: Delivery) -> None:
        """Refuse a delivery that is not held."""
        self._holder_of(delivery)

    def close(self) -> None:
        """Commit settled messages and leave all groups."""
        while self._subscriptions:
            self._subscriptions.popitem()[1].close()

    def _holder_of(self, delivery: Delivery) -> _Subscription:
        for subscription in self._subscriptions.values():
            if subscription.holds(delivery):
                return subscription
        raise _no_longer_held(delivery.message.id)


class _Subscription:
    """A membership in the consumer group of one channel."""

    def __init__(self, clients: KafkaClients, channel: str, visibility: timedelta) -> None:
        self._clients = clients
        self._channel = channel
        self._progress: dict[int, Progress] = {}
        #: The offset behind the last fetched record of each partition.
        self._fetched: dict[int, int] = {}
        self._waiting: deque[KafkaMessage] = deque()
        self._held: dict[str, KafkaMessage] = {}
        #: Released messages, and when they may be delivered again.
        self._later: list[tuple[float, KafkaMessage]] = []
        self._is_member = False
        self._unsaved: set[int] = set()
        self._saved_at = time.monotonic()
        interval = min(max(visibility, SHORTEST_POLL_INTERVAL), LONGEST_POLL_INTERVAL)
        self._consumer = clients.make_consumer(
            {
                "enable.partition.eof": True,
                "group.id": group_of(clients, channel),
                "max.poll.interval.ms": interval // timedelta(milliseconds=1),
                "session.timeout.ms": 10_000,
                "queued.min.messages": 1000,
                # A caller that wants one message need not wait for others.
                "fetch.wait.max.ms": 20,
            }
        )
        self._consumer.subscribe([channel], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def receive(self, limit: int) -> list[Delivery]:
        self._fetch(limit)
        deliveries = list[Delivery]()
        while self._waiting and len(deliveries) < limit:
            record = self._waiting[0]
            progress = self._progress[record.partition()]
            if not progress.has_room_for(record.offset()):
                break
            self._waiting.popleft()
            if progress.begin(record.offset()):
                handle = f"{self._channel}.{record.partition()}.{record.offset()}"
                self._held[handle] = record
                deliveries.append(_delivery(record, handle))
        return deliveries

    def peek(self, limit: int) -> list[Message]:
        self._fetch(limit)
        return [decode_record(record).message for record, _ in zip(self._waiting, range(limit), strict=False)]

    def holds(self, delivery: Delivery) -> bool:
        return delivery.handle in self._held

    def is_dead_letter(self, delivery: Delivery) -> bool:
        return decode_record(self._held[delivery.handle]).change is Change.DEAD_LETTERED

    def settle(self, delivery: Delivery) -> None:
        record = self._held.pop(delivery.handle)
        self._progress[record.partition()].end(record.offset())
        self._unsaved.add(record.partition())
        if not self._held or time.monotonic() > self._saved_at + COMMIT_SECONDS:
            try:
                self._save()
            except KafkaException as error:
                raise _no_longer_held(delivery.message.id) from error

    def take_back(self, delivery: Delivery, delay: timedelta) -> None:
        record = self._held.pop(delivery.handle)
        if delay <= timedelta(0):
            self._waiting.appendleft(record)
        else:
            self._later.append((time.monotonic() + delay.total_seconds(), record))

    def close(self) -> None:
        self._clients.close_consumer(self._consumer)

    # -- pieces --------------------------------------------------------------------------------------------------

    def _fetch(self, limit: int) -> None:
        """Fetch until there are so many messages, or no more."""
        # If the partitions are being reassigned, settled messages that are not committed are delivered again.
        with suppress(KafkaException):
            self._save()
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._is_member:
            self._poll(0.1)
            if time.monotonic() > deadline:
                raise self._clients.failure(
                    KafkaError(KafkaError._TIMED_OUT), f"joining the consumers of {self._channel}"
                )
        self._poll(0.0)
        now = time.monotonic()
        self._waiting.extendleft(record for at, record in self._later if at <= now)
        self._later = [each for each in self._later if each[0] > now]
        if len(self._waiting) >= limit or not self._progress:
            return
        ends = stable_ends(self._clients, [TopicPartition(self._channel, each) for each in self._progress])
        deadline = time.monotonic() + FETCH_SECONDS
        while len(self._waiting) < limit and time.monotonic() < deadline:
            if all(self._fetched.get(number, end) >= end for (_, number), end in ends.items()):
                return
            self._poll(0.05)

    def _poll(self, wait: float) -> None:
        for record in take(self._consumer, wait):
            error, number = record.error(), record.partition()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise self._clients.failure(error, f"reading {self._channel}")
            if number not in self._progress:
                continue
            self._fetched[number] = max(self._fetched[number], record.offset() + (error is None))
            if error is None and self._progress[number].is_waiting(record.offset()):
                self._waiting.append(record)

    def _save(self) -> None:
        """Commit settled messages."""
        if not self._unsaved:
            return
        offsets = [
            TopicPartition(self._channel, number, self._progress[number].low, self._progress[number].note())
            for number in self._unsaved
        ]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() in _LOST:
                raise
            raise self._clients.failure(error, f"committing to {self._channel}") from error
        self._unsaved.clear()
        self._saved_at = time.monotonic()

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._is_member = True
        if not partitions:
            return
        assigned = [TopicPartition(self._channel, each.partition) for each in partitions]
        committed = self._clients.ask(
            lambda: consumer.committed(assigned, 10.0), f"joining the consumers of {self._channel}"
        )
        starts = log_starts(self._clients, assigned)
        for each in committed:
            progress = progress_of(each, starts)
            self._progress[each.partition], self._fetched[each.partition] = progress, progress.low
        consumer.assign([TopicPartition(self._channel, number, each.low) for number, each in self._progress.items()])

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            self._save()
        except KafkaException:
            self._unsaved.clear()
        self._on_lost(consumer, partitions)

    def _on_lost(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        """Forget all held messages: others receive them, and settling them is refused from now on."""
        self._is_member = False
        self._progress.clear()
        self._fetched.clear()
        self._waiting.clear()
        self._held.clear()
        self._later.clear()
        self._unsaved.clear()


def group_of(clients: KafkaClients, channel: str) -> str:
    """Return the consumer group of a channel."""
    return f"{clients.config.consumer_group}.{channel}"


def decode_record(record: KafkaMessage) -> header_protocol.DecodedMessage:
    """Return the message of a record in a channel."""
    return header_protocol.decode_message(
        topic=record.topic(),
        default_id=f"{record.topic()}-{record.partition()}-{record.offset()}",
        key=record.key(),
        value=record.value(),
        headers=record.headers(),
        timestamp_ms=record.timestamp()[1],
    )


def _delivery(record: KafkaMessage, handle: str) -> Delivery:
    decoded = decode_record(record)
    end = None
    if decoded.change is Change.DEAD_LETTERED:
        # A dead letter is written when its message is given up.
        end = GivenUp(reason=decoded.reason, at=from_ms(record.timestamp()[1]))
    return Delivery(message=decoded.message, handle=handle, given_up=end)


def _no_longer_held(message_id: str) -> LifecycleError:
    return LifecycleError(
        message_id,
        "is no longer held: it was settled, or its partition went to another consumer, which receives it",
    )
