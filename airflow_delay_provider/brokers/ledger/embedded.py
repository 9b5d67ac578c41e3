"""The brokers whose messages wait in the ledger: what they share, and the embedded one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from airflow_delay_provider.brokers.consumer import BATCH, Bound, SharedConsumer, View
from airflow_delay_provider.brokers.ledger import channels, delivery, journal, listing, notices, replay, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.delivery import Claim
from airflow_delay_provider.brokers.ledger.records import StoredRow
from airflow_delay_provider.brokers.port import DEFAULT_VISIBILITY, Broker, Outcome, Receipt
from airflow_delay_provider.domain.arguments import Limits, OnConflict
from airflow_delay_provider.domain.clock import Clock, ceil_ms, floor_ms
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters, Replayed
from airflow_delay_provider.domain.exceptions import LedgerError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry
from airflow_delay_provider.domain.message import Delivery, Message, require_aware

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.channels import Visible

#: Messages of one transaction.
REPLAY_BATCH = 1000


class LedgerBroker(Broker):
    """Keeps each message as a row of the ledger until it is dispatched."""

    ledger: Ledger

    def __init__(self, ledger: Ledger, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        super().__init__(limits=limits, clock=clock)
        self.ledger = ledger

    # -- scheduling ----------------------------------------------------------------------------------------------

    def _store(
        self, messages: Sequence[Message], on_conflict: OnConflict, *, send_now: bool = False
    ) -> tuple[list[Receipt], list[Claim]]:
        """Store all messages or none; dispatch or claim those that are due, or all of them with ``send_now``."""
        try:
            return self.ledger.transact(self._insert, messages, on_conflict, send_now=send_now)
        except LedgerError as error:
            raise LedgerError(str(error), unconfirmed=[message.id for message in messages]) from error

    def _insert(
        self, connection: Connection, messages: Sequence[Message], on_conflict: OnConflict, *, send_now: bool
    ) -> tuple[list[Receipt], list[Claim]]:
        now_ms = self._now_ms()
        fresh = scheduling.insert(
            connection, messages, destination=self.destination, on_conflict=on_conflict, now_ms=now_ms
        )
        due = {row.seq for row in fresh.values() if send_now or row.deliver_at_ms <= now_ms}
        if not send_now and any(message.key is not None for message in messages):
            due -= delivery.behind_earlier(connection, sorted(due), destination=self.destination, now_ms=now_ms)
        if waiting := [row.deliver_at_ms for row in fresh.values() if row.seq not in due]:
            notices.announce(connection, min(waiting), now_ms=now_ms)
        claims = self._dispatch_due(connection, sorted(due))
        replaced = Outcome.REPLACED if on_conflict is OnConflict.REPLACE else Outcome.SCHEDULED
        return [_receipt(message, fresh.get(message.id), due, replaced) for message in messages], claims

    @abstractmethod
    def _dispatch_due(self, connection: Connection, seqs: Sequence[int]) -> list[Claim]:
        """Dispatch stored messages in the same transaction, or claim them to be sent after it."""

    # -- control -------------------------------------------------------------------------------------------------

    def cancel(self, message_ids: Sequence[str]) -> None:
        self._change(message_ids, Change.CANCELLED)

    def reschedule(self, message_ids: Sequence[str], deliver_at: datetime) -> None:
        due = require_aware("deliver_at", deliver_at)
        self.limits.check_delay(due, now=self.clock.now())
        self._change(message_ids, Change.RESCHEDULED, deliver_at_ms=ceil_ms(due))

    def expedite(self, message_ids: Sequence[str]) -> None:
        self._change(message_ids, Change.EXPEDITED, deliver_at_ms=self._now_ms())

    def _change(self, message_ids: Sequence[str], change: Change, *, deliver_at_ms: int | None = None) -> None:
        self.ledger.transact(
            scheduling.change_waiting, message_ids, change, now_ms=self._now_ms(), deliver_at_ms=deliver_at_ms
        )

    # -- replay --------------------------------------------------------------------------------------------------

    def count_dead(self, selection: DeadLetters) -> DeadCount:
        with self.ledger.read() as connection:
            return DeadCount(count=replay.count(connection, selection, destination=self.destination))

    def replay(self, selection: DeadLetters) -> Replayed:
        """Schedule dead messages again, one transaction per batch: a crash leaves the rest dead."""
        began_ms, count, found = self._now_ms(), 0, set[str]()
        while rows := self.ledger.transact(
            replay.replay,
            selection,
            destination=self.destination,
            now_ms=self._now_ms(),
            died_until_ms=began_ms,
            limit=REPLAY_BATCH,
        ):
            count += len(rows)
            if selection.message_ids:
                found |= {row.id for row in rows}
            if len(rows) < REPLAY_BATCH:
                break
        return Replayed(count=count, missing=tuple(each for each in selection.message_ids if each not in found))

    # -- journal -------------------------------------------------------------------------------------------------

    def journal_end(self) -> str:
        with self.ledger.read() as connection:
            return journal.end(connection)

    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        with self.ledger.read() as connection:
            return journal.read(connection, after=after, limit=limit)

    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:  # noqa: ARG002
        # The journal is indexed by message, so nothing needs to be read back from ``since``.
        with self.ledger.read() as connection:
            return journal.final_entries(connection, message_ids)

    def find_outcomes_of_each(self, since: Mapping[str, str]) -> Mapping[str, JournalEntry]:
        return self.find_outcomes(list(since), since=FROM_THE_START)

    # -- life ----------------------------------------------------------------------------------------------------

    def _settings(self) -> object:
        return self.ledger.url

    def check(self) -> str:
        with self.ledger.read() as connection:
            known = sum(listing.count_by_state(connection).values())
        return f"ledger at {self.ledger.name} is ready; it contains {known} messages"

    def close(self) -> None:
        self.ledger.close()

    def _now_ms(self) -> int:
        return floor_ms(self.clock.now())

    def _due_ms(self, delay: timedelta) -> int:
        """Return the due time after ``delay``: never early, and without a delay not later than now."""
        return ceil_ms(self.clock.now() + delay) if delay > timedelta(0) else self._now_ms()


class EmbeddedBroker(LedgerBroker):
    """Exactly once from ``schedule`` to the channel: channels are tables of the ledger's own database.

    Moving a message into its channel and marking it as dispatched is one transaction.
    """

    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]:
        return self._store(messages, on_conflict)[0]

    def _send(self, messages: Sequence[Message]) -> list[Receipt]:
        return self._store(messages, OnConflict.KEEP, send_now=True)[0]

    def _dispatch_due(self, connection: Connection, seqs: Sequence[int]) -> list[Claim]:
        delivery.deliver_now(connection, seqs, now_ms=self._now_ms())
        return []

    def receive(
        self,
        channel: str,
        *,
        limit: int = 1,
        visibility: timedelta = DEFAULT_VISIBILITY,
        wait: timedelta = timedelta(0),  # noqa: ARG002 - no other consumer holds messages
    ) -> list[Delivery]:
        # An empty channel is seen without taking the write lock.
        with self.ledger.read() as connection:
            if channels.is_empty(connection, channel, now_ms=self._now_ms()):
                return []
        return self.ledger.transact(self._receive, channel, limit, visibility)

    def _receive(self, connection: Connection, channel: str, limit: int, visibility: timedelta) -> list[Delivery]:
        now = self.clock.now()
        return channels.receive(
            connection, channel, limit=limit, now_ms=floor_ms(now), visible_again_ms=ceil_ms(now + visibility)
        )

    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        with self.ledger.read() as connection:
            return channels.peek(connection, channel, limit=limit, now_ms=self._now_ms())

    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        del on_change  # A database does not announce changes.
        return EmbeddedSharedConsumer(self.ledger, self.clock)

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        _refuse_ended(deliveries, self.ledger.transact(channels.ack, deliveries))

    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        visible_at_ms = ceil_ms(self.clock.now() + delay)
        _refuse_ended(deliveries, self.ledger.transact(channels.release, deliveries, visible_at_ms=visible_at_ms))

    def requeue(self, delivery: Delivery, delay: timedelta, *, reason: str | None = None) -> None:
        self.ledger.transact(self._requeue, delivery, delay, reason)

    def _requeue(self, connection: Connection, delivery: Delivery, delay: timedelta, reason: str | None) -> None:
        # Before now, so that without a delay it is due.
        due_ms = self._due_ms(delay)
        channels.requeue(connection, delivery, deliver_at_ms=due_ms, now_ms=self._now_ms(), reason=reason)

    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        self.ledger.transact(channels.dead_letter, delivery, channel=channel, now_ms=self._now_ms(), reason=reason)


class EmbeddedSharedConsumer(SharedConsumer):
    """Finds the messages of all channels with one query, holds none, and reads each only once."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._known: dict[Visible, Message] = {}

    def look(self, bounds: Mapping[str, Bound]) -> Mapping[str, View]:
        limits = {channel: bound.messages for channel, bound in bounds.items()}
        with self._ledger.read() as connection:
            visible = channels.visible(connection, limits, now_ms=floor_ms(self._clock.now()))
            known: dict[Visible, Message] = {}
            views = dict[str, View]()
            for channel, bound in bounds.items():
                view: list[Message] = []
                for start in range(0, len(visible[channel]), BATCH):
                    if sum(len(message.payload) for message in view) >= bound.bytes:
                        break
                    batch = visible[channel][start : start + BATCH]
                    fresh = [each for each in batch if each not in self._known]
                    found = self._known | channels.messages(connection, fresh)
                    # A message that was taken between the two queries is only in the first.
                    known |= {each: found[each] for each in batch if each in found}
                    view += [found[each] for each in batch if each in found]
                views[channel] = view
        self._known = known
        return views

    def close(self) -> None:
        self._known = {}


def _receipt(message: Message, row: StoredRow | None, due: set[int], replaced: Outcome) -> Receipt:
    if row is None:
        outcome = Outcome.KEPT
    elif row.seq in due:
        outcome = Outcome.DISPATCHED
    elif row.generation > 0:
        outcome = replaced
    else:
        outcome = Outcome.SCHEDULED
    return Receipt(message_id=message.id, outcome=outcome)


def _refuse_ended(deliveries: Sequence[Delivery], ended: set[str]) -> None:
    for item in deliveries:
        if item.handle in ended:
            raise channels.visibility_ended(item)
