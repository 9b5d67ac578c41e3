"""RabbitMQ behind the port: it holds messages and dispatches them by itself."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property

from pika import BasicProperties

from airflow_delay_provider.brokers.broker_held import BrokerHeld, HeldDeliveries, require_dead_letter_channel
from airflow_delay_provider.brokers.consumer import SharedConsumer
from airflow_delay_provider.brokers.port import (
    DEFAULT_VISIBILITY,
    HasTopology,
    KeepsUndelivered,
    Outcome,
    Receipt,
    TopologyIssue,
)
from airflow_delay_provider.brokers.rabbitmq import admin, wire
from airflow_delay_provider.brokers.rabbitmq.client import RabbitMQClient
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.journal import JournalReader
from airflow_delay_provider.brokers.rabbitmq.management import (
    DispatchCheck,
    count_in_relays,
    measure_clock_skew,
    wake_queues,
)
from airflow_delay_provider.brokers.rabbitmq.parked import ParkedMessages, count_parked
from airflow_delay_provider.brokers.rabbitmq.shared_consumer import RabbitMQSharedConsumer
from airflow_delay_provider.brokers.rabbitmq.topology import is_exchange
from airflow_delay_provider.brokers.rabbitmq.verify import verify
from airflow_delay_provider.domain.arguments import Limits
from airflow_delay_provider.domain.clock import Clock, ceil_ms, floor_ms
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters
from airflow_delay_provider.domain.exceptions import (
    BrokerError,
    ConfigurationError,
    InvalidMessageError,
    NoRecallError,
    TooFarError,
    UnknownChannelError,
)
from airflow_delay_provider.domain.lifecycle import Change, JournalEntry
from airflow_delay_provider.domain.message import Delivery, Message

log = logging.getLogger(__name__)


class RabbitMQBroker(BrokerHeld, HasTopology, KeepsUndelivered):
    """Delivers at least once from ``schedule`` to the channel, without a process of this package in between.

    A confirmed message is in a quorum queue, and each queue removes it only after the next one has it. A message is
    delivered twice, with the same id, when the broker dies in between or a caller publishes unconfirmed ids again.
    RabbitMQ does not know ids: ``on_conflict`` can only be ``keep``, and the same id again is another message.
    """

    product = "RabbitMQ"
    can_recall = False

    def __init__(self, config: RabbitMQConfig, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        super().__init__(limits=limits, clock=clock)
        self.config = config
        self.topology = config.topology
        self._client = RabbitMQClient(config)

    # -- scheduling ----------------------------------------------------------------------------------------------

    def check_message(self, message: Message, *, now: datetime) -> None:
        super().check_message(message, now=now)
        wire.check_message(message)
        self._require_reachable(message.deliver_at, ceil_ms(message.deliver_at) - floor_ms(now))

    def _require_reachable(self, deliver_at: datetime, delay_ms: int) -> None:
        longest_ms = self.topology.max_delay_ms
        if delay_ms > longest_ms:
            raise TooFarError(
                "deliver_at",
                f"{deliver_at.isoformat()} is more than {timedelta(milliseconds=longest_ms)} ahead, the longest delay"
                f" of a ladder with a tick of {self.topology.tick_ms} ms",
                'choose an earlier time, a longer tick of the connection, or hold="ledger"',
            )

    def _publish_scheduled(self, messages: Sequence[Message]) -> list[Receipt]:
        now_ms = floor_ms(self.clock.now())
        self._publish(messages)
        return [
            Receipt(
                message_id=message.id,
                outcome=Outcome.SCHEDULED if ceil_ms(message.deliver_at) > now_ms else Outcome.DISPATCHED,
            )
            for message in messages
        ]

    def _send(self, messages: Sequence[Message]) -> list[Receipt]:
        for message in messages:
            wire.check_message(message)
        self._publish(messages, delay_ms=0)
        return [Receipt(message_id=message.id, outcome=Outcome.DISPATCHED) for message in messages]

    def check_channels(self, channels: Iterable[str]) -> None:
        for channel in dict.fromkeys(channels):
            self._client.bind(self.topology.require_fitting(channel))

    def _publish(
        self,
        messages: Sequence[Message],
        *,
        channel: str | None = None,
        delay_ms: int | None = None,
        change: Change | None = None,
        reason: str | None = None,
    ) -> None:
        """Publish to this channel or each message's own, after this delay or at each message's due time.

        The delay is counted from the moment a message is sent, so that a large batch makes no message late.
        """
        if not messages:
            return
        route, clock = self.topology.route, self.clock

        def prepare(message: Message) -> tuple[str, str, BasicProperties]:
            now = clock.now()
            delay = _delay_ms(message.deliver_at, now) if delay_ms is None else delay_ms
            exchange, key = route(channel or message.channel, delay)
            return exchange, key, wire.encode_properties(message, now=now, change=change, reason=reason)

        try:
            publisher = self._client.publisher()
            self.check_channels([channel] if channel is not None else (message.channel for message in messages))
        except BrokerError as error:
            error.unconfirmed = tuple(message.id for message in messages)
            raise
        publisher.publish(messages, prepare)

    # -- control -------------------------------------------------------------------------------------------------

    def cancel(self, message_ids: Sequence[str]) -> None:
        self._refuse_recall(message_ids, "cancelled")

    def reschedule(self, message_ids: Sequence[str], deliver_at: datetime) -> None:  # noqa: ARG002 - the port's
        self._refuse_recall(message_ids, "rescheduled")

    def expedite(self, message_ids: Sequence[str]) -> None:
        self._refuse_recall(message_ids, "expedited")

    def _refuse_recall(self, message_ids: Sequence[str], what: str) -> None:
        if message_ids:
            raise NoRecallError(
                message_ids[0],
                f"is held by RabbitMQ itself and cannot be {what}, because a queue gives nothing back; schedule"
                ' messages that may change with hold="ledger", on the operator or in the connection\'s extra',
            )

    # -- consuming -----------------------------------------------------------------------------------------------

    def receive(
        self,
        channel: str,
        *,
        limit: int = 1,
        visibility: timedelta = DEFAULT_VISIBILITY,
        wait: timedelta = timedelta(0),
    ) -> list[Delivery]:
        # RabbitMQ redelivers unsettled messages when the connection ends, not after a time.
        del visibility
        return self._client.receiver().receive(_queue_of(channel), limit, self.clock.now(), wait=wait.total_seconds())

    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        return self._client.receiver().peek(_queue_of(channel), limit, self.clock.now())

    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        return RabbitMQSharedConsumer(self._client, self.clock, on_change=on_change)

    def counts_returns(self) -> bool:
        return self._client.connection().counts_returns

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        receiver = self._client.receiver()
        for delivery in deliveries:
            receiver.ack(delivery)

    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        if delay <= timedelta(0):
            self._client.receiver().give_back(deliveries)
            return
        for delivery in deliveries:
            self._repost(delivery, delivery.message, delay, Change.REQUEUED, "released unhandled")

    def _held_deliveries(self) -> HeldDeliveries:
        return self._client.receiver()

    def _create_channel(self, channel: str, missing: UnknownChannelError) -> None:
        if is_exchange(channel):
            raise missing
        admin.declare_queue(self._client.connection_with_ladder(), channel)

    def _publish_again(
        self, message: Message, delay: timedelta, change: Change, reason: str | None, *, channel: str | None
    ) -> None:
        delay_ms = max(0, -(-delay // timedelta(milliseconds=1)))
        self._require_reachable(message.deliver_at, delay_ms)
        self._publish([message], channel=channel, delay_ms=delay_ms, change=change, reason=reason)

    # -- replay --------------------------------------------------------------------------------------------------

    def count_dead(self, selection: DeadLetters) -> DeadCount:
        queue = _queue_of(require_dead_letter_channel(selection, self.product))
        try:
            waiting = admin.message_count(self._client.connection(), queue)
        except UnknownChannelError:
            return DeadCount(count=0)
        # A look at the messages would count as a delivery.
        return DeadCount(count=waiting, is_exact=selection.is_whole_channel or not waiting)

    def _dead_letter_channels(self, selection: DeadLetters) -> list[str]:
        return [require_dead_letter_channel(selection, self.product)]

    # -- journal -------------------------------------------------------------------------------------------------

    def journal_end(self) -> str:
        return self._journal.end()

    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        return self._journal.read(after, limit)

    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:
        return self._journal.find(message_ids, since) if message_ids else {}

    @cached_property
    def _journal(self) -> JournalReader:
        if not self.topology.journal:
            raise ConfigurationError(
                "journal: is off for this connection, so it is unknown what was dispatched; set journal to true"
            )
        return JournalReader(self._client.connection_with_ladder, self.clock, DispatchCheck(self.config))

    # -- the ladder ----------------------------------------------------------------------------------------------

    def create_topology(self, channels: Sequence[str] = ()) -> str:
        admin.declare_ladder(self._client.connection(), self.topology)
        self._client.forget_ladder()
        self.check_channels(channels)
        wake_queues(self.config)
        return self.topology.prefix

    def require_topology(self) -> None:
        self._client.connection_with_ladder()

    def verify_topology(self) -> list[TopologyIssue]:
        return list(verify(self._client.connection(), self.topology))

    def delete_topology(self, *, even_if_messages_wait: bool = False) -> str:
        self._client.forget_ladder()
        admin.delete_ladder(self._client.connection(), self.topology, even_if_messages_wait=even_if_messages_wait)
        return self.topology.prefix

    # -- refused and parked messages -----------------------------------------------------------------------------

    def count_refused(self) -> Mapping[str, int] | None:
        return count_in_relays(self.config) if self.config.management_url is not None else None

    def count_parked(self) -> int:
        return count_parked(self._client.connection())

    def count_parked_by_channel(self) -> Mapping[str, int]:
        with ParkedMessages(self._client.connection()) as parked:
            return Counter(message.channel for batch in parked.batches(self.clock) for message in batch.values())

    def replay_parked(self, channels: Sequence[str] = ()) -> Mapping[str, int]:
        sent: Counter[str] = Counter()
        with ParkedMessages(self._client.connection()) as parked:
            for batch in parked.batches(self.clock):
                wanted = {tag: message for tag, message in batch.items() if self._can_replay(message, channels)}
                # With a delay of one tick they pass the ladder like all others: the journal records the dispatch, and
                # refused messages stay in the relay.
                self._publish(list(wanted.values()), delay_ms=1, change=Change.REQUEUED, reason="was parked")
                parked.ack(wanted)
                sent.update(message.channel for message in wanted.values())
        return sent

    def _can_replay(self, message: Message, channels: Sequence[str]) -> bool:
        if channels and message.channel not in channels:
            return False
        try:
            wire.check_message(message)
            self.check_channels([message.channel])
        except InvalidMessageError as error:
            log.warning("Message %r stays parked: %s", message.id, error)
            return False
        return message.channel != self.topology.unroutable

    # -- connection ----------------------------------------------------------------------------------------------

    def _settings(self) -> object:
        return self.config

    def check(self) -> str:
        connection = self._client.connection()
        state = {
            True: "is ready",
            False: "is created with the first message",
            None: f"is not visible to user {self.config.login!r}, who has no permission on it, see docs/rabbitmq.md",
        }[admin.is_declared(connection, self.topology)]
        return f"{self.config.name}: {connection.server} answers; the ladder {self.topology.prefix} {state}"

    def clock_skew(self) -> timedelta | None:
        return measure_clock_skew(self.config, self.clock)

    def close(self) -> None:
        self._client.close()


def _delay_ms(deliver_at: datetime, now: datetime) -> int:
    """Return the delay in whole milliseconds, up to one too short, which ``EXTRA_HOLD_MS`` makes good.

    Rounded up, a second from now would be a millisecond more than a second, and so a tick more.
    """
    return max(1, ceil_ms(deliver_at) - ceil_ms(now)) if deliver_at > now else 0


def _queue_of(channel: str) -> str:
    if is_exchange(channel):
        raise UnknownChannelError(
            "channel", f"{channel!r} is an exchange and cannot be consumed", "name a queue bound to it"
        )
    return channel
