"""RabbitMQ behind the port: the broker holds the wait and dispatches by itself."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from pika import BasicProperties

from airflow_delay_provider.brokers.base import (
    DEFAULT_VISIBILITY,
    Broker,
    Finding,
    KeepsUndelivered,
    Outcome,
    Provisioned,
    Receipt,
)
from airflow_delay_provider.brokers.dead_letters import replay_from, require_channel_of
from airflow_delay_provider.brokers.rabbitmq import declaring, removal, wire
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.inspecting import verify
from airflow_delay_provider.brokers.rabbitmq.journal import JournalReader
from airflow_delay_provider.brokers.rabbitmq.link import Link
from airflow_delay_provider.brokers.rabbitmq.management import wake_queues
from airflow_delay_provider.brokers.rabbitmq.parked import ParkedMessages
from airflow_delay_provider.brokers.rabbitmq.relays import Relays, count_held
from airflow_delay_provider.brokers.rabbitmq.shared_consumer import RabbitMQSharedConsumer
from airflow_delay_provider.brokers.rabbitmq.topology import is_exchange
from airflow_delay_provider.brokers.shared_consumer import SharedConsumer
from airflow_delay_provider.domain.clock import Clock, ceil_ms, floor_ms, from_ms
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters, Replayed
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Delivery, Message
from airflow_delay_provider.domain.schedule import Limits, OnConflict
from airflow_delay_provider.exceptions import (
    BrokerError,
    ConfigurationError,
    InvalidMessageError,
    NoRecallError,
    TooFarError,
    UnknownChannelError,
)

log = logging.getLogger(__name__)

REPLAY_AT_ONCE = 500


class RabbitMQBroker(Broker, Provisioned, KeepsUndelivered):
    """At least once from ``schedule`` to the channel, with no process of ours in between.

    A message that is confirmed lies in a durable queue, and each queue lets go of it only when the next one has it
    (quorum). Twice can happen when the broker dies in between, or when a caller publishes unconfirmed ids again; the id
    is the same then. The broker does not know ids, so ``on_conflict`` cannot be kept here: ``fail`` and ``replace`` are
    refused, and the same id again is another message.
    """

    knows_ids = False
    can_recall = False

    def __init__(self, config: RabbitMQConfig, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        super().__init__(limits=limits, clock=clock)
        self.config = config
        self.topology = config.topology
        self._link = Link(config)
        self._journal = JournalReader(self._link.session_with_ladder, self.clock, Relays(config))

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
                f"{deliver_at.isoformat()} is more than {timedelta(milliseconds=longest_ms)} ahead, the longest"
                f" that a ladder with a tick of {self.topology.tick_ms} ms holds",
                'choose an earlier time, a longer tick of the connection, or hold="ledger"',
            )

    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]:
        if on_conflict is not OnConflict.KEEP:
            raise InvalidMessageError(
                "on_conflict",
                f"RabbitMQ cannot tell whether an id is taken, so {on_conflict.value!r} cannot be kept",
                'use on_conflict="keep", or hold="ledger" for this message or connection',
            )
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
            self._link.bind(self.topology.require_fitting(channel))

    def _publish(
        self,
        messages: Sequence[Message],
        *,
        channel: str | None = None,
        delay_ms: int | None = None,
        change: Change | None = None,
        reason: str | None = None,
    ) -> None:
        """Publish to the channel given or to each message's own; after the delay given or at each message's due time.

        The delay is counted from the moment a message leaves, so that a long batch makes nothing late.
        """
        if not messages:
            return
        route, clock = self.topology.route, self.clock

        def prepare(message: Message) -> tuple[str, str, BasicProperties]:
            now = clock.now()
            delay = _delay_ms(message.deliver_at, now) if delay_ms is None else delay_ms
            exchange, key = route(channel or message.channel, delay)
            return exchange, key, wire.write_properties(message, now=now, change=change, reason=reason)

        try:
            publisher = self._link.publisher()
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
                f"is held by RabbitMQ itself and cannot be {what}: a queue gives nothing back; schedule messages that"
                ' may have to be called back with hold="ledger", on the operator or in the connection\'s extra',
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
        # RabbitMQ hands out again what is unsettled when its consumer's connection ends, not after a time.
        del visibility
        return self._link.receiver().receive(_queue_of(channel), limit, self.clock.now(), wait=wait.total_seconds())

    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        return self._link.receiver().peek(_queue_of(channel), limit, self.clock.now())

    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        return RabbitMQSharedConsumer(self._link, self.clock, on_change=on_change)

    def counts_returns(self) -> bool:
        return self._link.session().counts_returns

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        receiver = self._link.receiver()
        for delivery in deliveries:
            receiver.ack(delivery)

    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        if delay <= timedelta(0):
            self._link.receiver().give_back(deliveries)
            return
        for delivery in deliveries:
            self._repost(delivery, delivery.message, delay, Change.REQUEUED, "given back unhandled")

    def requeue(self, delivery: Delivery, delay: timedelta, *, reason: str | None = None) -> None:
        now = self.clock.now()
        deliver_at = now + delay if delay > timedelta(0) else from_ms(floor_ms(now))
        if self._link.receiver().is_dead_letter(delivery):
            message = delivery.message.replayed(deliver_at)
        else:
            message = delivery.message.requeued(deliver_at)
        self._repost(delivery, message, delay, Change.REQUEUED, reason)

    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        try:
            self.check_channels([channel])
        except UnknownChannelError:
            if is_exchange(channel):
                raise
            # Nobody should have to prepare for failures: otherwise a poison message comes again and again.
            declaring.declare_queue(self._link.session_with_ladder(), channel)
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
        """Publish again and acknowledge after that is confirmed: a crash in between repeats, and loses nothing."""
        receiver = self._link.receiver()
        receiver.require_held(delivery)
        delay_ms = max(0, -(-delay // timedelta(milliseconds=1)))
        self._require_reachable(message.deliver_at, delay_ms)
        self._publish([message], channel=channel, delay_ms=delay_ms, change=change, reason=reason)
        receiver.ack(delivery)

    # -- replay --------------------------------------------------------------------------------------------------

    def count_dead(self, selection: DeadLetters) -> DeadCount:
        queue = _queue_of(require_channel_of(selection, "RabbitMQ"))
        try:
            waiting = declaring.message_count(self._link.session(), queue)
        except UnknownChannelError:
            return DeadCount(count=0)
        # To look at messages would be to hand them out, which counts.
        return DeadCount(count=waiting, is_exact=selection.is_whole_channel or not waiting)

    def replay(self, selection: DeadLetters) -> Replayed:
        return replay_from(self, selection, [require_channel_of(selection, "RabbitMQ")])

    # -- journal -------------------------------------------------------------------------------------------------

    def journal_end(self) -> str:
        return self._require_journal().end()

    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        return self._require_journal().read(after, limit)

    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:
        return self._require_journal().find(message_ids, since) if message_ids else {}

    def _require_journal(self) -> JournalReader:
        if not self.topology.journal:
            raise ConfigurationError(
                "journal: is off for this connection, so nobody can tell what was dispatched; set journal to true"
            )
        return self._journal

    # -- the ladder ----------------------------------------------------------------------------------------------

    def create_topology(self, channels: Sequence[str] = ()) -> str:
        declaring.declare(self._link.session(), self.topology)
        self._link.forget_ladder()
        self.check_channels(channels)
        wake_queues(self.config)
        return self.topology.prefix

    def verify_topology(self) -> list[Finding]:
        return list(verify(self._link.session(), self.topology))

    def delete_topology(self, *, even_if_messages_wait: bool = False) -> str:
        self._link.forget_ladder()
        removal.delete(self._link.session(), self.topology, even_if_messages_wait=even_if_messages_wait)
        return self.topology.prefix

    # -- what channels do not take -------------------------------------------------------------------------------

    def count_refused(self) -> Mapping[str, int] | None:
        return count_held(self.config) if self.config.management_url is not None else None

    def count_parked(self) -> int:
        try:
            return declaring.message_count(self._link.session(), self.topology.unroutable)
        except UnknownChannelError:
            return 0

    def count_parked_by_channel(self) -> Mapping[str, int]:
        with ParkedMessages(self._link.session()) as parked:
            return Counter(message.channel for message in parked.take_all(self.clock))

    def replay_parked(self, channels: Sequence[str] = ()) -> Mapping[str, int]:
        sent: Counter[str] = Counter()
        with ParkedMessages(self._link.session()) as parked:
            while batch := parked.take(REPLAY_AT_ONCE, self.clock):
                wanted = {each: message for each, message in batch.items() if self._can_replay(message, channels)}
                # After a tick, so that they take the way of all others: the journal tells of it, and what a channel
                # refuses waits in its relay.
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

    # -- life ----------------------------------------------------------------------------------------------------

    def _settings(self) -> object:
        return self.config

    def check(self) -> str:
        session = self._link.session()
        state = {
            True: "is ready",
            False: "is created with the first message",
            None: f"cannot be seen by user {self.config.login!r}, who has no permission on it, see docs/rabbitmq.md",
        }[declaring.is_declared(session, self.topology)]
        return f"{self.config.name}: {session.server} answers; the ladder {self.topology.prefix} {state}"

    def close(self) -> None:
        self._link.close()


def _delay_ms(deliver_at: datetime, now: datetime) -> int:
    """Return the delay in whole milliseconds, up to one too short, which each rest makes good (``GUARD_MS``).

    Rounded up instead, a second from now would be a millisecond more than a second, and so a tick more.
    """
    return max(1, ceil_ms(deliver_at) - ceil_ms(now)) if deliver_at > now else 0


def _queue_of(channel: str) -> str:
    if is_exchange(channel):
        raise UnknownChannelError(
            "channel", f"{channel!r} is an exchange, from which nothing can be consumed", "name a queue bound to it"
        )
    return channel
