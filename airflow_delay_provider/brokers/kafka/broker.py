"""Kafka behind the port: messages wait in its topics, and dispatchers move them on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain

from airflow_delay_provider.brokers.base import (
    DEFAULT_VISIBILITY,
    Broker,
    Climbed,
    Climber,
    Finding,
    OnDispatched,
    Outcome,
    Provisioned,
    Receipt,
)
from airflow_delay_provider.brokers.dead_letters import is_meant, replay_from
from airflow_delay_provider.brokers.kafka import administering, wire
from airflow_delay_provider.brokers.kafka.administering import ChannelFacts
from airflow_delay_provider.brokers.kafka.climber import KafkaClimber
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.journal import JournalReader
from airflow_delay_provider.brokers.kafka.journal_wire import write_entry
from airflow_delay_provider.brokers.kafka.lane import MAX_VALUE_BYTES
from airflow_delay_provider.brokers.kafka.link import Link
from airflow_delay_provider.brokers.kafka.publishing import Outgoing, publish
from airflow_delay_provider.brokers.kafka.recalling import Recaller
from airflow_delay_provider.brokers.kafka.receiving import Receiver
from airflow_delay_provider.brokers.kafka.shared_consumer import KafkaSharedConsumer
from airflow_delay_provider.brokers.kafka.topology import Topic
from airflow_delay_provider.brokers.shared_consumer import SharedConsumer
from airflow_delay_provider.domain.clock import Clock, ceil_ms, floor_ms, from_ms
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters, Replayed
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Delivery, Message, require_aware
from airflow_delay_provider.domain.schedule import Limits, OnConflict
from airflow_delay_provider.exceptions import (
    BrokerError,
    ChannelError,
    InvalidMessageError,
    MessagesWaitError,
    PayloadError,
    UnknownChannelError,
)

#: How long what is known of a channel is believed.
BELIEVE_SECONDS = 60.0
#: What a record needs besides payload, key and headers.
OVERHEAD_BYTES = 1000


class KafkaBroker(Broker, Provisioned, Climbed):
    """Exactly once from the inbox to the channel, for readers of committed records.

    What is confirmed lies in the inbox, on all replicas that are in sync. Scheduling itself is at least once: a caller
    that publishes unconfirmed ids again may schedule them twice. Kafka does not know ids, so ``on_conflict`` cannot be
    kept here: ``fail`` and ``replace`` are refused, and the same id again is another message.
    """

    knows_ids = False

    def __init__(self, config: KafkaConfig, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        super().__init__(limits=limits, clock=clock)
        self.config = config
        self.topology = config.topology
        self._link = Link(config)
        self._journal = JournalReader(self._link)
        self._recaller = Recaller(self._link, self._journal)
        self._receiver = Receiver(self._link)
        self._channels: dict[str, tuple[float, ChannelFacts]] = {}
        self._is_ready = False

    # -- scheduling ----------------------------------------------------------------------------------------------

    def check_message(self, message: Message, *, now: datetime) -> None:
        super().check_message(message, now=now)
        wire.check_message(message)

    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]:
        if on_conflict is not OnConflict.KEEP:
            raise InvalidMessageError(
                "on_conflict",
                f"Kafka cannot tell whether an id is taken, so {on_conflict.value!r} cannot be kept",
                'use on_conflict="keep", or hold="ledger" for this message or connection',
            )
        self._prepare(messages)
        now_ms = floor_ms(self.clock.now())
        waiting, due, receipts = list[tuple[Message, int]](), list[Message](), list[Receipt]()
        for message in messages:
            until_ms = ceil_ms(message.deliver_at)
            if until_ms > now_ms:
                waiting.append((message, until_ms))
                receipts.append(Receipt(message_id=message.id, outcome=Outcome.SCHEDULED))
            else:
                due.append(message)
                receipts.append(Receipt(message_id=message.id, outcome=Outcome.DISPATCHED))
        # Written while the first ones are on their way.
        self._publish((self._held(message, until_ms, now_ms) for message, until_ms in waiting), due, now_ms)
        return receipts

    def _send(self, messages: Sequence[Message]) -> list[Receipt]:
        for message in messages:
            wire.check_message(message)
        self._prepare(messages)
        self._publish([], messages, floor_ms(self.clock.now()))
        return [Receipt(message_id=message.id, outcome=Outcome.DISPATCHED) for message in messages]

    def check_channels(self, channels: Iterable[str]) -> None:
        for channel in dict.fromkeys(channels):
            self._facts_of(channel)

    def _prepare(self, messages: Sequence[Message]) -> None:
        """Refuse what could not be delivered, before anything is written."""
        if not messages:
            return
        try:
            facts = {channel: self._facts_of(channel) for channel in {message.channel for message in messages}}
            for message in messages:
                _require_fitting(message, facts[message.channel])
            self._require_ladder()
        except BrokerError as error:
            error.unconfirmed = tuple(message.id for message in messages)
            raise

    def _facts_of(self, channel: str) -> ChannelFacts:
        known = self._channels.get(channel)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        wire.check_channel(channel)
        facts = administering.channel_facts(self._link, channel)
        if facts is None:
            raise UnknownChannelError(
                "channel", f"{self.config.name} has no topic {channel!r}", "create it, or correct the name"
            )
        if 0 <= facts.retention_ms < administering.SHORTEST_RETENTION_MS:
            raise ChannelError(
                f"{self.config.name}: topic {channel} forgets messages after {facts.retention_ms} ms, so one could be"
                f" gone before anybody reads it; set its retention.ms to {administering.SHORTEST_RETENTION_MS} or more"
            )
        self._channels[channel] = (time.monotonic() + BELIEVE_SECONDS, facts)
        return facts

    def _require_ladder(self) -> None:
        if not self._is_ready:
            administering.require_usable(self._link, self.topology)
            self._is_ready = True

    def _held(
        self,
        message: Message,
        until_ms: int,
        now_ms: int,
        *,
        change: Change | None = None,
        reason: str | None = None,
    ) -> Outgoing:
        """Return the record with which a message begins to wait."""
        return Outgoing(
            message.id,
            self.topology.inbox,
            wire.write_envelope(message, now_ms=now_ms, change=change, reason=reason),
            wire.write_key(until_ms, message.id),
            self.topology.lane_of(message.key, message.id),
        )

    def _publish(
        self,
        waiting: Iterable[Outgoing],
        due: Sequence[Message],
        now_ms: int,
        *,
        channel: str | None = None,
        change: Change | None = None,
        reason: str | None = None,
    ) -> None:
        """Write what waits to the inbox and what is due to the channel given, or to each message's own.

        Nobody else tells the journal of what is put into a channel here, so that is done once it is confirmed.
        """
        direct = [
            Outgoing(
                message.id,
                channel or message.channel,
                message.payload,
                None if message.key is None else message.key.encode(),
                headers=wire.write_headers(
                    message, now_ms=now_ms, topic=channel or message.channel, change=change, reason=reason
                ),
            )
            for message in due
        ]
        try:
            publish(self._link, chain(waiting, direct))
        except BrokerError as error:
            self._tell([each for each in due if each.id not in error.unconfirmed], now_ms, change, reason)
            raise
        self._tell(due, now_ms, change, reason)

    def _tell(self, messages: Sequence[Message], now_ms: int, change: Change | None, reason: str | None) -> None:
        match change:
            case Change.REQUEUED:
                changes = [Change.REQUEUED, Change.DISPATCHED]
            case Change.DEAD_LETTERED:
                changes = [Change.DEAD_LETTERED]
            case _:
                changes = [Change.DISPATCHED]
        records = []
        for message in messages:
            envelope = wire.write_envelope(message, now_ms=now_ms)
            entries = [
                write_entry(
                    each,
                    at_ms=now_ms,
                    deliver_at_ms=ceil_ms(message.deliver_at),
                    message_id=message.id.encode(),
                    channel=message.channel,
                    reason=None if each is Change.DISPATCHED else reason,
                    envelope=envelope if index == 0 else b"",
                )
                for index, each in enumerate(changes)
            ]
            lane = self.topology.lane_of(message.key, message.id)
            records.append(Outgoing(message.id, self.topology.journal, b"".join(entries), None, lane))
        publish(self._link, records)

    # -- control -------------------------------------------------------------------------------------------------

    def cancel(self, message_ids: Sequence[str]) -> None:
        self._recall(message_ids, Change.CANCELLED, None)

    def reschedule(self, message_ids: Sequence[str], deliver_at: datetime) -> None:
        due = require_aware("deliver_at", deliver_at)
        self.limits.check_delay(due, now=self.clock.now())
        self._recall(message_ids, Change.RESCHEDULED, ceil_ms(due))

    def expedite(self, message_ids: Sequence[str]) -> None:
        self._recall(message_ids, Change.EXPEDITED, floor_ms(self.clock.now()))

    def _recall(self, message_ids: Sequence[str], change: Change, deliver_at_ms: int | None) -> None:
        if message_ids:
            self._require_ladder()
            self._recaller.recall(message_ids, change, deliver_at_ms)

    # -- consuming -----------------------------------------------------------------------------------------------

    def receive(
        self,
        channel: str,
        *,
        limit: int = 1,
        visibility: timedelta = DEFAULT_VISIBILITY,
        wait: timedelta = timedelta(0),  # noqa: ARG002 - a shared consumer reads along and holds nothing
    ) -> list[Delivery]:
        return self._receiver.receive(channel, limit, visibility)

    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        return self._receiver.peek(channel, limit)

    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        del on_change  # The library fetches by itself and keeps what has come until it is asked.
        return KafkaSharedConsumer(self._link)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._receiver.ack(delivery)

    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        # The last one first, so that they come again in their order.
        for delivery in reversed(deliveries):
            self._receiver.give_back(delivery, delay)

    def requeue(self, delivery: Delivery, delay: timedelta, *, reason: str | None = None) -> None:
        now = self.clock.now()
        deliver_at = now + delay if delay > timedelta(0) else from_ms(floor_ms(now))
        start = delivery.message.replayed if self._receiver.is_dead_letter(delivery) else delivery.message.requeued
        self._repost(delivery, start(deliver_at), delay, Change.REQUEUED, reason)

    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        try:
            self._facts_of(channel)
        except UnknownChannelError:
            # Nobody should have to prepare for failures: otherwise a poison message comes again and again.
            administering.create_topics(self._link, self.topology, [Topic(name=channel)])
        self._repost(delivery, delivery.message, timedelta(0), Change.DEAD_LETTERED, reason, channel=channel)

    def _repost(
        self,
        delivery: Delivery,
        message: Message,
        delay: timedelta,
        change: Change,
        reason: str | None,
        *,
        channel: str | None = None,
    ) -> None:
        """Write again and settle after that is confirmed: a crash in between repeats, and loses nothing."""
        self._receiver.require_held(delivery)
        self._require_ladder()
        now = self.clock.now()
        if delay > timedelta(0):
            held = self._held(message, ceil_ms(now + delay), floor_ms(now), change=change, reason=reason)
            self._publish([held], [], floor_ms(now))
        else:
            self._publish([], [message], floor_ms(now), channel=channel, change=change, reason=reason)
        self._receiver.ack(delivery)

    # -- replay --------------------------------------------------------------------------------------------------

    def count_dead(self, selection: DeadLetters) -> DeadCount:
        count = 0
        for channel in self._dead_letter_channels(selection):
            # A topic that is not there has no dead letters.
            with suppress(UnknownChannelError):
                count += sum(is_meant(selection, delivery, channel) for delivery in self._receiver.look(channel))
        return DeadCount(count=count)

    def replay(self, selection: DeadLetters) -> Replayed:
        return replay_from(self, selection, self._dead_letter_channels(selection))

    def _dead_letter_channels(self, selection: DeadLetters) -> list[str]:
        """Return where to look: what consumers gave up, and what the dispatcher could not deliver."""
        if selection.dead_letter_channel is not None:
            return [selection.dead_letter_channel]
        of_consumers = [] if selection.channel is None else [f"{selection.channel}.dead"]
        return [*of_consumers, self.topology.dead]

    # -- journal -------------------------------------------------------------------------------------------------

    def journal_end(self) -> str:
        self._require_ladder()
        return self._journal.end()

    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        self._require_ladder()
        return self._journal.read(after, limit)

    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:
        if not message_ids:
            return {}
        self._require_ladder()
        return self._journal.find(message_ids, since)

    # -- the ladder ----------------------------------------------------------------------------------------------

    def open_climber(self, *, instance: str | None = None, on_dispatched: OnDispatched | None = None) -> Climber:
        return KafkaClimber(self._link, self.clock, instance=instance, on_dispatched=on_dispatched)

    def create_topology(self, channels: Sequence[str] = ()) -> str:
        administering.require_complete(self._link, self.topology)
        self.check_channels(channels)
        return self.topology.prefix

    def verify_topology(self) -> list[Finding]:
        return list(administering.verify(self._link, self.topology))

    def delete_topology(self, *, even_if_messages_wait: bool = False) -> str:
        self._is_ready = False
        if not even_if_messages_wait and (topic := self._recaller.find_any()) is not None:
            raise MessagesWaitError(
                f"{self.config.name}: messages wait in topic {topic}; wait until they have left, or use --force"
            )
        administering.delete(self._link, self.topology)
        return self.topology.prefix

    # -- life ----------------------------------------------------------------------------------------------------

    def _settings(self) -> object:
        return self.config

    def check(self) -> str:
        there = administering.partition_counts(self._link)
        state = "is ready" if self.topology.inbox in there else "is created with the first message"
        return f"{self.config.name}: answers; the ladder {self.topology.prefix} {state}"

    def close(self) -> None:
        self._receiver.close()
        self._link.close()


def _require_fitting(message: Message, facts: ChannelFacts) -> None:
    """Refuse a message that its channel would not take."""
    size = len(message.payload) + OVERHEAD_BYTES
    most = min(facts.max_message_bytes, MAX_VALUE_BYTES)
    if message.headers:
        size += sum(len(name) + len(value) for name, value in message.headers.items())
    if size > most:
        raise PayloadError(
            "payload",
            f"message {message.id!r} of {len(message.payload)} bytes does not fit into topic {message.channel!r},"
            f" which takes {most} with all headers",
            "send a reference to the data, or raise max.message.bytes of the topic",
        )
    if facts.is_compacted and message.key is None:
        raise InvalidMessageError(
            "key", f"topic {message.channel!r} is compacted and takes no message without one", "give a key"
        )
