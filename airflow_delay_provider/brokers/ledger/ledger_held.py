"""Messages for another broker that wait in the ledger: they can be cancelled and moved, whatever the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from sqlalchemy import Connection

from airflow_delay_provider.brokers.broker_held import take_from
from airflow_delay_provider.brokers.consumer import SharedConsumer
from airflow_delay_provider.brokers.ledger import channels, delivery, replay
from airflow_delay_provider.brokers.ledger.claims import renewed
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.delivery import Claim
from airflow_delay_provider.brokers.ledger.embedded import LedgerBroker
from airflow_delay_provider.brokers.ledger.heartbeats import process_name
from airflow_delay_provider.brokers.ledger.records import AnyRow
from airflow_delay_provider.brokers.port import DEFAULT_VISIBILITY, Broker, Receipt
from airflow_delay_provider.domain.arguments import Limits, OnConflict
from airflow_delay_provider.domain.clock import Clock, ceil_ms
from airflow_delay_provider.domain.dead_letters import DeadLetters, Replayed
from airflow_delay_provider.domain.exceptions import BrokerError, DelayError, LedgerError, LifecycleError
from airflow_delay_provider.domain.lifecycle import CLAIM
from airflow_delay_provider.domain.message import Delivery, Message

#: Dead letters that are looked for in one go through a dead-letter channel.
COPIES_AT_ONCE = 10_000


class LedgerHeldBroker(LedgerBroker):
    """At least once: the dispatcher sends messages that become due; a message that is due at once is sent here.

    A crash after the other broker has confirmed and before the row is marked lets the claim end, and the dispatcher
    sends the message again with the same id. No message is lost or early. Consumers use the other broker.

    :param destination: the connection of ``target``, by which the dispatcher finds it.
    """

    def __init__(
        self,
        ledger: Ledger,
        destination: str,
        target: Broker,
        *,
        limits: Limits | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(ledger, limits=limits, clock=clock)
        self.destination: str = destination
        self.target = target
        self._owner = process_name()

    def check_channels(self, channels: Iterable[str]) -> None:
        self.target.check_channels(channels)

    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]:
        return self._store_and_send(messages, on_conflict)

    def _send(self, messages: Sequence[Message]) -> list[Receipt]:
        return self._store_and_send(messages, OnConflict.KEEP, send_now=True)

    def _store_and_send(
        self, messages: Sequence[Message], on_conflict: OnConflict, *, send_now: bool = False
    ) -> list[Receipt]:
        try:
            self.check_channels(sorted({message.channel for message in messages}))
        except BrokerError as error:
            raise BrokerError(str(error), unconfirmed=[message.id for message in messages]) from error
        receipts, claims = self._store(messages, on_conflict, send_now=send_now)
        self._send_claimed(claims)
        return receipts

    def _dispatch_due(self, connection: Connection, seqs: Sequence[int]) -> list[Claim]:
        until_ms = ceil_ms(self.clock.now() + CLAIM)
        return delivery.claim_now(connection, seqs, owner=self._owner, until_ms=until_ms)

    def receive(
        self,
        channel: str,
        *,
        limit: int = 1,
        visibility: timedelta = DEFAULT_VISIBILITY,
        wait: timedelta = timedelta(0),
    ) -> list[Delivery]:
        return self.target.receive(channel, limit=limit, visibility=visibility, wait=wait)

    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        return self.target.peek(channel, limit=limit)

    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        return self.target.open_shared_consumer(on_change=on_change)

    def counts_returns(self) -> bool:
        return self.target.counts_returns()

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        self.target.ack(deliveries)

    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        self.target.release(deliveries, delay=delay)

    def requeue(self, delivery: Delivery, delay: timedelta, *, reason: str | None = None) -> None:
        """Store it, then acknowledge it: a crash in between repeats the message and never loses it."""
        claims, waits = self.ledger.transact(self._put_back, delivery.message, delay, reason)
        try:
            self.target.ack([delivery])
        except LifecycleError:
            # Another consumer has it by now and settles it; for the ledger it stays dispatched.
            self._settle(sent=claims)
            raise
        except DelayError:
            self._settle(unsent=claims)
            raise
        if waits:
            self._settle(unsent=claims)
        else:
            self._send_claimed(claims)

    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        self.target.dead_letter(delivery, channel=channel, reason=reason)
        self.ledger.transact(
            channels.give_up_at, delivery.message, destination=self.destination, now_ms=self._now_ms(), reason=reason
        )

    def replay(self, selection: DeadLetters) -> Replayed:
        """Schedule dead messages again, after removing their copies from the other broker's dead-letter channel.

        In this order a crash costs only a copy: the message is still dead in the ledger.
        """
        after_seq = 0
        while rows := self._find_copies(selection, after_seq):
            by_channel: dict[str, set[str]] = {}
            for row in rows:
                by_channel.setdefault(row.channel, set()).add(row.id)
            for channel, ids in by_channel.items():
                where = selection.dead_letter_channel or f"{channel}.dead"
                self._remove_copies(where, ids)
            after_seq = rows[-1].seq
        return super().replay(selection)

    def _remove_copies(self, channel: str, message_ids: set[str]) -> None:
        take_from(
            self.target,
            channel,
            lambda delivery: delivery.message.id in message_ids,
            lambda delivery: self.target.ack([delivery]),
        )

    def _find_copies(self, selection: DeadLetters, after_seq: int) -> list[AnyRow]:
        with self.ledger.read() as connection:
            return replay.given_up_by_consumers(
                connection, selection, destination=self.destination, after_seq=after_seq, limit=COPIES_AT_ONCE
            )

    def _settings(self) -> object:
        return super()._settings(), self.destination, self.target._settings()

    def check(self) -> str:
        return f"{super().check()}; {self.target.check()}"

    def clock_skew(self) -> timedelta | None:
        return self.target.clock_skew()

    def close(self) -> None:
        try:
            self.target.close()
        finally:
            super().close()

    def _put_back(
        self, connection: Connection, message: Message, delay: timedelta, reason: str | None
    ) -> tuple[list[Claim], bool]:
        """Store a message again, claimed so that it is not sent before it is acknowledged; say whether it waits."""
        due_ms, now_ms = self._due_ms(delay), self._now_ms()
        seq = channels.put_back_from(
            connection, message, destination=self.destination, deliver_at_ms=due_ms, now_ms=now_ms, reason=reason
        )
        if seq is None:
            return [], True
        behind = delivery.behind_earlier(connection, [seq], destination=self.destination, now_ms=now_ms)
        return self._dispatch_due(connection, [seq]), due_ms > now_ms or bool(behind)

    def _send_claimed(self, claims: Sequence[Claim]) -> None:
        if not claims:
            return
        try:
            with renewed(self.ledger, claims, owner=self._owner, clock=self.clock):
                self.target.send([claim.message for claim in claims])
        except BrokerError as error:
            sent, unsent = delivery.divide(claims, unconfirmed=error.unconfirmed)
            self._settle(sent=sent, unsent=unsent)
            raise BrokerError(
                f"{error}; messages that were not confirmed stay in the ledger, and the dispatcher sends them",
                unconfirmed=[claim.message.id for claim in unsent],
            ) from error
        except DelayError as error:
            sent, unsent = delivery.divide(claims, unconfirmed=error.unconfirmed)
            self._settle(sent=sent, unsent=unsent)
            raise
        self._settle(sent=claims)

    def _settle(self, *, sent: Sequence[Claim] = (), unsent: Sequence[Claim] = ()) -> None:
        if not sent and not unsent:
            return
        try:
            self.ledger.transact(delivery.settle, sent=sent, unsent=unsent, owner=self._owner, now_ms=self._now_ms())
        except LedgerError as error:
            open_ids = [claim.message.id for claim in (*sent, *unsent)]
            raise LedgerError(str(error), unconfirmed=open_ids) from error
