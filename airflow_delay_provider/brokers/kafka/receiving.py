"""Messages in the hands of consumers, and how each is settled.

Consumers of one channel share its partitions, as a consumer group. What was handed out and not settled is handed out
again when its consumer is gone. Settled messages are remembered one by one, so that one that is handled for long holds
up nobody, and none that was settled comes again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as KafkaMessage

from airflow_delay_provider.brokers.kafka import administering, wire
from airflow_delay_provider.brokers.kafka.progress import Progress, progress_of
from airflow_delay_provider.brokers.kafka.reading import Partition, Reader, take
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Delivery, GivenUp, Message
from airflow_delay_provider.exceptions import LifecycleError, UnknownChannelError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.link import Link

#: How long it may take to become a member of a group.
JOIN_SECONDS = 20.0
#: How long what is there may take to come.
FETCH_SECONDS = 10.0
#: Settled messages are committed at least so often while others are in hand.
COMMIT_SECONDS = 1.0
SHORTEST_POLL_INTERVAL = timedelta(minutes=5)
LONGEST_POLL_INTERVAL = timedelta(days=1)
_LOST = {KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS}


class Receiver:
    """All channels that one client consumes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._subscriptions: dict[str, _Subscription] = {}

    def receive(self, channel: str, limit: int, visibility: timedelta) -> list[Delivery]:
        """Hand out what is there."""
        subscription = self._subscriptions.get(channel)
        if subscription is None:
            partition_count(self._link, channel)
            subscription = self._subscriptions[channel] = _Subscription(self._link, channel, visibility)
        return subscription.hand_out(limit)

    def peek(self, channel: str, limit: int) -> list[Message]:
        """Return what could be handed out; who is no consumer of the channel does not become one."""
        if channel in self._subscriptions:
            return self._subscriptions[channel].peek(limit)
        return [delivery.message for delivery in islice(self.look(channel), limit)]

    def look(self, channel: str) -> Iterator[Delivery]:
        """Return what is not settled, one after the other, without becoming a consumer; none can be settled."""
        places = [(channel, number) for number in range(partition_count(self._link, channel))]
        reader = Reader(self._link, group=group_of(self._link, channel))
        try:
            yield from self._look(reader, places)
        finally:
            reader.close()

    def _look(self, reader: Reader, places: Sequence[Partition]) -> Iterator[Delivery]:
        partitions = [TopicPartition(*each) for each in places]
        starts = administering.log_starts(self._link, partitions)
        ends = administering.stable_ends(self._link, partitions)
        progress = {
            (each.topic, each.partition): progress_of(each, starts)
            for each in reader.committed(places, seconds=FETCH_SECONDS)
        }
        begin = {where: each.low for where, each in progress.items()}
        for record in reader.read_between(begin, ends):
            if progress[record.topic(), record.partition()].is_waiting(record.offset()):
                yield _delivery(record, "")

    def ack(self, delivery: Delivery) -> None:
        """Settle a message for good."""
        self._holder_of(delivery).settle(delivery)

    def give_back(self, delivery: Delivery, delay: timedelta) -> None:
        """Take a message back, to hand it out again after a while; should we be gone by then, another does so."""
        self._holder_of(delivery).take_back(delivery, delay)

    def is_dead_letter(self, delivery: Delivery) -> bool:
        """Whether the message was given up before."""
        return self._holder_of(delivery).is_dead_letter(delivery)

    def require_held(self, delivery: Delivery) -> None:
        """Refuse a message that is not in hand."""
        self._holder_of(delivery)

    def close(self) -> None:
        """Commit what is settled and leave all groups."""
        while self._subscriptions:
            self._subscriptions.popitem()[1].close()

    def _holder_of(self, delivery: Delivery) -> _Subscription:
        for subscription in self._subscriptions.values():
            if subscription.holds(delivery):
                return subscription
        raise _no_longer_in_hand(delivery.message.id)


class _Subscription:
    """The membership in the group of one channel."""

    def __init__(self, link: Link, channel: str, visibility: timedelta) -> None:
        self._link = link
        self._channel = channel
        self._progress: dict[int, Progress] = {}
        #: Up to where each partition was fetched.
        self._fetched: dict[int, int] = {}
        self._waiting: deque[KafkaMessage] = deque()
        self._held: dict[str, KafkaMessage] = {}
        #: Given back, and when they may be handed out again.
        self._later: list[tuple[float, KafkaMessage]] = []
        self._is_member = False
        self._unsaved: set[int] = set()
        self._saved_at = time.monotonic()
        interval = min(max(visibility, SHORTEST_POLL_INTERVAL), LONGEST_POLL_INTERVAL)
        self._consumer = link.make_consumer(
            {
                "enable.partition.eof": True,
                "group.id": group_of(link, channel),
                "max.poll.interval.ms": interval // timedelta(milliseconds=1),
                "session.timeout.ms": 10_000,
                "queued.min.messages": 1000,
                # Who asks for one message should not have to wait until all others are there.
                "fetch.wait.max.ms": 20,
            }
        )
        self._consumer.subscribe([channel], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def hand_out(self, limit: int) -> list[Delivery]:
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
        return [read_record(record).message for record, _ in zip(self._waiting, range(limit), strict=False)]

    def holds(self, delivery: Delivery) -> bool:
        return delivery.handle in self._held

    def is_dead_letter(self, delivery: Delivery) -> bool:
        return read_record(self._held[delivery.handle]).change is Change.DEAD_LETTERED

    def settle(self, delivery: Delivery) -> None:
        record = self._held.pop(delivery.handle)
        self._progress[record.partition()].end(record.offset())
        self._unsaved.add(record.partition())
        if not self._held or time.monotonic() > self._saved_at + COMMIT_SECONDS:
            try:
                self._save()
            except KafkaException as error:
                raise _no_longer_in_hand(delivery.message.id) from error

    def take_back(self, delivery: Delivery, delay: timedelta) -> None:
        record = self._held.pop(delivery.handle)
        if delay <= timedelta(0):
            self._waiting.appendleft(record)
        else:
            self._later.append((time.monotonic() + delay.total_seconds(), record))

    def close(self) -> None:
        self._link.close_consumer(self._consumer)

    # -- pieces --------------------------------------------------------------------------------------------------

    def _fetch(self, limit: int) -> None:
        """Read until there are so many messages, or all that are there."""
        # Where the partitions go to others in this moment, what is settled and not committed comes to them again.
        with suppress(KafkaException):
            self._save()
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._is_member:
            self._poll(0.1)
            if time.monotonic() > deadline:
                raise self._link.failure(KafkaError(KafkaError._TIMED_OUT), f"joining the consumers of {self._channel}")
        self._poll(0.0)
        now = time.monotonic()
        self._waiting.extendleft(record for at, record in self._later if at <= now)
        self._later = [each for each in self._later if each[0] > now]
        if len(self._waiting) >= limit or not self._progress:
            return
        ends = administering.stable_ends(self._link, [TopicPartition(self._channel, each) for each in self._progress])
        deadline = time.monotonic() + FETCH_SECONDS
        while len(self._waiting) < limit and time.monotonic() < deadline:
            if all(self._fetched.get(number, end) >= end for (_, number), end in ends.items()):
                return
            self._poll(0.05)

    def _poll(self, wait: float) -> None:
        for record in take(self._consumer, wait):
            error, number = record.error(), record.partition()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                raise self._link.failure(error, f"reading {self._channel}")
            if number not in self._progress:
                continue
            self._fetched[number] = max(self._fetched[number], record.offset() + (error is None))
            if error is None and self._progress[number].is_waiting(record.offset()):
                self._waiting.append(record)

    def _save(self) -> None:
        """Commit what is settled."""
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
            raise self._link.failure(error, f"committing to {self._channel}") from error
        self._unsaved.clear()
        self._saved_at = time.monotonic()

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._is_member = True
        if not partitions:
            return
        places = [TopicPartition(self._channel, each.partition) for each in partitions]
        committed = self._link.ask(
            lambda: consumer.committed(places, 10.0), f"joining the consumers of {self._channel}"
        )
        starts = administering.log_starts(self._link, places)
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
        """Everything that is in hand goes to others, and what is settled from now on is refused."""
        self._is_member = False
        self._progress.clear()
        self._fetched.clear()
        self._waiting.clear()
        self._held.clear()
        self._later.clear()
        self._unsaved.clear()


def partition_count(link: Link, channel: str) -> int:
    """Return how many partitions a channel has; refuse one that does not exist."""
    wire.check_channel(channel)
    facts = administering.channel_facts(link, channel)
    if facts is None:
        raise UnknownChannelError(
            "channel", f"{link.config.name} has no topic {channel!r}", "create it, or correct the name"
        )
    return facts.partitions


def group_of(link: Link, channel: str) -> str:
    """Return the consumer group of a channel."""
    return f"{link.config.consumer_group}.{channel}"


def read_record(record: KafkaMessage) -> wire.Wired:
    """Return what a record of a channel says."""
    return wire.read_message(
        topic=record.topic(),
        position=f"{record.topic()}-{record.partition()}-{record.offset()}",
        key=record.key(),
        value=record.value(),
        headers=record.headers(),
        timestamp_ms=record.timestamp()[1],
    )


def _delivery(record: KafkaMessage, handle: str) -> Delivery:
    wired = read_record(record)
    end = None
    if wired.change is Change.DEAD_LETTERED:
        # A dead letter is written when the message is given up.
        end = GivenUp(reason=wired.reason, at=from_ms(record.timestamp()[1]))
    return Delivery(message=wired.message, handle=handle, given_up=end)


def _no_longer_in_hand(message_id: str) -> LifecycleError:
    return LifecycleError(
        message_id, "is no longer in hand: it was settled, or its partition went to another consumer, who gets it again"
    )
