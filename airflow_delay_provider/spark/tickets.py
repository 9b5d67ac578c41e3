"""Tickets: a ticket is the message that releases the next submission of a Spark job."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID, uuid5

from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.exceptions import DelayError, UnknownMessageError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.hooks.task import cancel_in_time

if TYPE_CHECKING:
    from airflow_delay_provider.domain.arguments import Limits
    from airflow_delay_provider.spark.retries import History

log = logging.getLogger(__name__)

#: Where tickets go. No consumer has to read it: waiting tasks learn from the journal that a ticket was dispatched.
DEFAULT_CHANNEL = "delay.retries"
DEFAULT_DEAD_LETTER_CHANNEL = "delay.retries.dead"
#: How many used tickets a task that comes back removes from their channel.
SWEEP = 100
#: How long it may take from choosing a delivery time to scheduling the ticket.
MARGIN = timedelta(seconds=1)


class WaitsFor(StrEnum):
    """Why a ticket waits."""

    BACKOFF = "backoff"
    #: The cluster is down: the wait is extended and costs no attempt.
    CLUSTER = "cluster"
    #: Many retries are due at once: the token bucket of the cluster spreads them.
    RATE_LIMIT = "rate_limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """One waiting submission."""

    origin: Origin
    #: Distinguishes the tickets of a cleared task from those before it was cleared.
    began_at: datetime
    #: Number of the submission that it releases.
    attempt: int
    verdict: str
    reason: str
    cluster: str
    deliver_at: datetime
    waits_for: WaitsFor = WaitsFor.BACKOFF
    #: How often it was extended.
    extension: int = 0

    @property
    def id(self) -> str:
        """The same for the same wait, so that scheduling it twice changes nothing."""
        wait = f"{ceil_ms(self.began_at)}.{self.extension}"
        return str(uuid5(UUID(self.origin.message_id(self.attempt)), wait))

    @property
    def is_plausible(self) -> bool:
        """Whether its values have their types; a payload may contain anything."""
        texts = (self.verdict, self.reason, self.cluster, *astuple(self.origin)[:3])
        numbers = (self.attempt, self.extension, self.origin.map_index)
        return (
            all(isinstance(each, str) for each in texts)
            and all(isinstance(each, int) for each in numbers)
            and self.began_at.tzinfo is not None
        )

    def extended(self, deliver_at: datetime, waits_for: WaitsFor) -> Ticket:
        """Return the ticket that follows when the job cannot be submitted yet."""
        return replace(self, deliver_at=deliver_at, waits_for=waits_for, extension=self.extension + 1)

    def accepted_by(self, limits: Limits, *, now: datetime) -> Ticket:
        """Return the ticket, later if need be: the connection may accept no delay as short as that."""
        if not limits.min_delay:
            return self
        return replace(self, deliver_at=max(self.deliver_at, now + limits.min_delay + MARGIN))

    def as_message(self, channel: str) -> Message:
        """Return the message for a broker."""
        return Message(
            id=self.id,
            channel=channel,
            payload=json.dumps(self.as_json()).encode(),
            deliver_at=self.deliver_at,
            content_type="application/json",
            origin=self.origin,
        )

    @classmethod
    def from_message(cls, message: Message) -> Ticket | None:
        """Undo :meth:`as_message`; return None for any other message."""
        try:
            ticket = replace(cls.from_json(json.loads(message.payload)), deliver_at=message.deliver_at)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return ticket if ticket.is_plausible else None

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        times = {"began_at": self.began_at.isoformat(), "deliver_at": self.deliver_at.isoformat()}
        return asdict(self) | times | {"waits_for": self.waits_for.value}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Ticket:
        """Undo :meth:`as_json`."""
        return cls(
            origin=Origin(**stored["origin"]),
            began_at=datetime.fromisoformat(stored["began_at"]),
            attempt=stored["attempt"],
            verdict=stored["verdict"],
            reason=stored["reason"],
            cluster=stored["cluster"],
            deliver_at=datetime.fromisoformat(stored["deliver_at"]),
            waits_for=WaitsFor(stored["waits_for"]),
            extension=stored["extension"],
        )


class RetryTickets:
    """The tickets of one task on their broker; use it in a ``with`` statement.

    :param delay_conn_id: the connection of the broker.
    :param hold: who holds waiting tickets, ``broker`` or ``ledger``; None is what the connection says.
    :param channel: where tickets go.
    :param dead_letter_channel: where :meth:`send_dead_letter` sends to; None sends nothing.
    """

    def __init__(
        self,
        *,
        delay_conn_id: str = DEFAULT_CONN_ID,
        hold: str | None = None,
        channel: str = DEFAULT_CHANNEL,
        dead_letter_channel: str | None = DEFAULT_DEAD_LETTER_CHANNEL,
    ) -> None:
        self.hook = DelayHook(delay_conn_id, hold=hold)
        self._channel = channel
        self._dead_letter_channel = dead_letter_channel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hook.close()

    def schedule(self, ticket: Ticket) -> str:
        """Schedule a ticket, once however often it is called; return a journal position from before that."""
        since = self.hook.get_conn().outcomes_begin()
        self.hook.schedule([ticket.as_message(self._channel)])
        return since

    def cancel(self, ticket_id: str) -> bool:
        """Cancel a ticket and return whether it will never be dispatched.

        If it is too late, or if the broker cannot cancel, the ticket is still dispatched; it is ignored then.
        """
        broker = self.hook.get_conn()
        if not broker.can_recall:
            return False
        try:
            return not cancel_in_time(broker, [ticket_id])
        except UnknownMessageError:  # it was not scheduled yet
            return True

    def is_gone(self, ticket_id: str) -> bool:
        """Tell whether a ticket was cancelled; assume so for a broker that cannot look up an id."""
        broker = self.hook.get_conn()
        if not broker.knows_ids:
            return True
        outcome = broker.find_outcomes([ticket_id], since=FROM_THE_START).get(ticket_id)
        return outcome is not None and outcome.change is Change.CANCELLED

    def send_dead_letter(self, origin: Origin, history: History, reason: str) -> None:
        """Send a message that all attempts are used up; an error is only logged, because the task fails anyway."""
        channel = self._dead_letter_channel
        if channel is None:
            return
        content = {"reason": reason, "origin": asdict(origin), **history.as_json()}
        letter_id = str(uuid5(UUID(origin.message_id(0)), f"dead.{ceil_ms(history.began_at)}"))
        try:
            broker = self.hook.get_conn()
            letter = Message(
                id=letter_id,
                channel=channel,
                payload=json.dumps(content).encode(),
                deliver_at=broker.clock.now(),
                content_type="application/json",
                origin=origin,
            )
            broker.send([letter])
        except DelayError as error:
            log.error("No dead letter was sent to %s: %s", channel, error)  # noqa: TRY400 - the sentence says it all
        else:
            log.info("A dead letter was sent to %s: %s", channel, letter_id)

    def sweep(self) -> None:
        """Remove used tickets from their channel, so that it does not grow."""
        broker = self.hook.get_conn()
        try:
            broker.ack(broker.receive(self._channel, limit=SWEEP))
        except DelayError as error:
            log.warning("Old tickets stay in %s: %s", self._channel, error)
