"""The Kafka broker: messages wait in topics, and dispatchers deliver them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from airflow_delay_provider.brokers.broker_held import BrokerHeld, HeldDeliveries
from airflow_delay_provider.brokers.consumer import SharedConsumer
from airflow_delay_provider.brokers.kafka import admin, header_protocol, verify
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch.loop import KafkaLadderDispatcher
from airflow_delay_provider.brokers.kafka.journal import JournalReader
from airflow_delay_provider.brokers.kafka.publish import Publisher
from airflow_delay_provider.brokers.kafka.recall import Recaller
from airflow_delay_provider.brokers.kafka.receive import Receiver
from airflow_delay_provider.brokers.kafka.shared_consumer import KafkaSharedConsumer
from airflow_delay_provider.brokers.kafka.topology import Topic
from airflow_delay_provider.brokers.port import (
    DEFAULT_VISIBILITY,
    HasTopology,
    LadderDispatcher,
    NeedsDispatcher,
    OnDispatched,
    Outcome,
    Receipt,
    TopologyIssue,
)
from airflow_delay_provider.domain.arguments import Limits
from airflow_delay_provider.domain.clock import Clock, ceil_ms, floor_ms
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters
from airflow_delay_provider.domain.exceptions import (
    BrokerError,
    MessagesWaitError,
    UnknownChannelError,
)
from airflow_delay_provider.domain.lifecycle import Change, JournalEntry
from airflow_delay_provider.domain.message import Delivery, Message, require_aware


class KafkaBroker(BrokerHeld, HasTopology, NeedsDispatcher):
    """Exactly once from the inbox to the channel, for consumers that read committed records.

    A confirmed message is in the inbox, on all replicas in sync. Scheduling itself is at least once: publishing
    unconfirmed ids again may schedule them twice. Kafka does not know ids, so it refuses ``on_conflict`` policies other
    than ``keep``, and the same id again is another message.
    """

    product = "Kafka"

    def __init__(self, config: KafkaConfig, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        super().__init__(limits=limits, clock=clock)
        self.config = config
        self.topology = config.topology
        self._clients = KafkaClients(config)
        self._journal = JournalReader(self._clients)
        self._recaller = Recaller(self._clients, self._journal)
        self._receiver = Receiver(self._clients)
        self._publisher = Publisher(self._clients)
        self._is_ready = False

    # -- scheduling ----------------------------------------------------------------------------------------------

    def check_message(self, message: Message, *, now: datetime) -> None:
        super().check_message(message, now=now)
        header_protocol.check_message(message)

    def _publish_scheduled(self, messages: Sequence[Message]) -> list[Receipt]:
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
        # Encoded while the first ones are in transit.
        records = (self._publisher.waiting(message, until_ms, now_ms) for message, until_ms in waiting)
        self._publisher.publish(records, due, now_ms)
        return receipts

    def _send(self, messages: Sequence[Message]) -> list[Receipt]:
        for message in messages:
            header_protocol.check_message(message)
        self._prepare(messages)
        self._publisher.publish([], messages, floor_ms(self.clock.now()))
        return [Receipt(message_id=message.id, outcome=Outcome.DISPATCHED) for message in messages]

    def check_channels(self, channels: Iterable[str]) -> None:
        self.channel_settings(channels)

    def channel_settings(self, channels: Iterable[str]) -> dict[str, admin.ChannelSettings]:
        """Return the settings of channels; refuse one that cannot receive messages."""
        return {channel: self._publisher.check_channel(channel) for channel in dict.fromkeys(channels)}

    def _prepare(self, messages: Sequence[Message]) -> None:
        """Refuse messages that could not be delivered, before any is written."""
        if not messages:
            return
        try:
            self._publisher.check(messages)
            self.require_topology()
        except BrokerError as error:
            error.unconfirmed = tuple(message.id for message in messages)
            raise

    def require_topology(self) -> None:
        if not self._is_ready:
            verify.require_usable(self._clients, self.topology)
            self._is_ready = True

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
            self.require_topology()
            self._recaller.recall(message_ids, change, deliver_at_ms)

    # -- consuming -----------------------------------------------------------------------------------------------

    def receive(
        self,
        channel: str,
        *,
        limit: int = 1,
        visibility: timedelta = DEFAULT_VISIBILITY,
        wait: timedelta = timedelta(0),  # noqa: ARG002 - a shared consumer holds no messages
    ) -> list[Delivery]:
        return self._receiver.receive(channel, limit, visibility)

    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        return self._receiver.peek(channel, limit)

    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        del on_change  # The library fetches in the background and keeps the records.
        return KafkaSharedConsumer(self._clients)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._receiver.ack(delivery)

    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        # The last one first, so that they are delivered again in their order.
        for delivery in reversed(deliveries):
            self._receiver.give_back(delivery, delay)

    def _held_deliveries(self) -> HeldDeliveries:
        return self._receiver

    def _create_channel(self, channel: str, missing: UnknownChannelError) -> None:  # noqa: ARG002 - any topic can be made
        admin.create_topics(self._clients, self.topology, [Topic(name=channel)])

    def _publish_again(
        self, message: Message, delay: timedelta, change: Change, reason: str | None, *, channel: str | None
    ) -> None:
        self.require_topology()
        now = self.clock.now()
        if delay > timedelta(0):
            until_ms = ceil_ms(now + delay)
            waiting = self._publisher.waiting(message, until_ms, floor_ms(now), change=change, reason=reason)
            self._publisher.publish([waiting], [], floor_ms(now))
        else:
            self._publisher.publish([], [message], floor_ms(now), channel=channel, change=change, reason=reason)

    # -- replay --------------------------------------------------------------------------------------------------

    def count_dead(self, selection: DeadLetters) -> DeadCount:
        count = 0
        for channel in self._dead_letter_channels(selection):
            # A topic that does not exist has no dead letters.
            with suppress(UnknownChannelError):
                count += sum(map(self._selector(selection, channel), self._receiver.browse(channel)))
        return DeadCount(count=count)

    def _dead_letter_channels(self, selection: DeadLetters) -> list[str]:
        """Return the topics of messages that consumers gave up, and that the dispatcher could not deliver."""
        if selection.dead_letter_channel is not None:
            return [selection.dead_letter_channel]
        of_consumers = [] if selection.channel is None else [f"{selection.channel}.dead"]
        return [*of_consumers, self.topology.dead]

    # -- journal -------------------------------------------------------------------------------------------------

    def journal_end(self) -> str:
        self.require_topology()
        return self._journal.end()

    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        self.require_topology()
        return self._journal.read(after, limit)

    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:
        return self.find_outcomes_of_each(dict.fromkeys(message_ids, since))

    def find_outcomes_of_each(self, since: Mapping[str, str]) -> Mapping[str, JournalEntry]:
        if not since:
            return {}
        self.require_topology()
        return self._journal.find(since)

    # -- the ladder ----------------------------------------------------------------------------------------------

    def open_ladder_dispatcher(
        self, *, instance: str | None = None, on_dispatched: OnDispatched | None = None
    ) -> LadderDispatcher:
        return KafkaLadderDispatcher(self._clients, self.clock, instance=instance, on_dispatched=on_dispatched)

    def create_topology(self, channels: Sequence[str] = ()) -> str:
        verify.require_complete(self._clients, self.topology)
        self.check_channels(channels)
        return self.topology.prefix

    def create_channel(self, channel: str) -> None:
        header_protocol.check_channel(channel)
        header_protocol.require_destination(channel)
        if admin.channel_settings(self._clients, channel) is None:
            admin.create_topics(self._clients, self.topology, [Topic(name=channel)])

    def verify_topology(self) -> list[TopologyIssue]:
        return list(verify.verify(self._clients, self.topology))

    def delete_topology(self, *, even_if_messages_wait: bool = False) -> str:
        self._is_ready = False
        if not even_if_messages_wait and (topic := self._recaller.find_any()) is not None:
            raise MessagesWaitError(
                f"{self.config.name}: messages wait in topic {topic}; wait until they have left, or use --force"
            )
        admin.delete(self._clients, self.topology)
        return self.topology.prefix

    # -- life ----------------------------------------------------------------------------------------------------

    def _settings(self) -> object:
        return self.config

    def check(self) -> str:
        there = admin.partition_counts(self._clients)
        state = "is ready" if self.topology.inbox in there else "is created with the first message"
        return f"{self.config.name}: answers; the ladder {self.topology.prefix} {state}"

    def close(self) -> None:
        self._receiver.close()
        self._clients.close()
