"""The port: what every broker can do, in the same words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import TracebackType
from typing import Self

from airflow_delay_provider.domain.clock import Clock, SystemClock
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.message import Delivery, Message
from airflow_delay_provider.domain.schedule import Limits, OnConflict
from airflow_delay_provider.exceptions import InvalidMessageError

DEFAULT_VISIBILITY = timedelta(minutes=5)


class Outcome(StrEnum):
    """What a confirmed ``schedule`` did with one message."""

    SCHEDULED = "scheduled"
    #: It was due already and is in its channel.
    DISPATCHED = "dispatched"
    #: The id was taken: nothing new was stored.
    KEPT = "kept"
    #: The waiting message with this id was replaced.
    REPLACED = "replaced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The broker's confirmation for one message."""

    message_id: str
    outcome: Outcome


class Broker(ABC):
    """A broker that delays. Calls return after the broker confirmed and raise ``BrokerError`` otherwise."""

    def __init__(self, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        self.limits = limits or Limits()
        self.clock = clock or SystemClock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- scheduling ----------------------------------------------------------------------------------------------

    def schedule(self, messages: Sequence[Message], *, on_conflict: OnConflict = OnConflict.KEEP) -> list[Receipt]:
        """Store all messages or none; a message that is due already goes straight to its channel.

        One that would overtake an earlier message of its channel and key waits for that.
        """
        now = self.clock.now()
        for message in messages:
            try:
                self.limits.check(message, now=now)
            except InvalidMessageError as error:
                if len(messages) > 1:
                    error.args = (f"message {message.id!r}: {error}",)
                raise
        return self._schedule(_require_distinct_ids(messages), on_conflict)

    def send(self, messages: Sequence[Message]) -> list[Receipt]:
        """Put all messages into their channels now, whatever their due time was; the same id again is kept."""
        for message in messages:
            self.limits.check_payload(message)
        return self._send(_require_distinct_ids(messages))

    @abstractmethod
    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]: ...

    @abstractmethod
    def _send(self, messages: Sequence[Message]) -> list[Receipt]: ...

    # -- control -------------------------------------------------------------------------------------------------

    @abstractmethod
    def cancel(self, message_ids: Sequence[str]) -> None:
        """Make sure none of them is ever dispatched, all or none; one that is cancelled already stays so."""

    @abstractmethod
    def reschedule(self, message_ids: Sequence[str], deliver_at: datetime) -> None:
        """Move waiting messages to another due time, all or none."""

    @abstractmethod
    def expedite(self, message_ids: Sequence[str]) -> None:
        """Make waiting messages due now, all or none."""

    # -- consuming -----------------------------------------------------------------------------------------------

    @abstractmethod
    def receive(self, channel: str, *, limit: int = 1, visibility: timedelta = DEFAULT_VISIBILITY) -> list[Delivery]:
        """Hand out up to ``limit`` messages without waiting; unsettled ones come again after ``visibility``."""

    @abstractmethod
    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        """Return up to ``limit`` messages that could be received now, leaving them where they are."""

    @abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Remove handled messages from their channel."""

    @abstractmethod
    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        """Give messages back unhandled; they are handed out again after ``delay`` and count nothing."""

    @abstractmethod
    def requeue(self, delivery: Delivery, delay: timedelta, *, reason: str | None = None) -> None:
        """Repost to the message's own channel after ``delay`` with its handled count raised by one.

        A dead letter is replayed: it starts again with a count of none.
        """

    @abstractmethod
    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        """Move a message that will not be tried again to the dead-letter ``channel``."""

    # -- journal -------------------------------------------------------------------------------------------------

    @abstractmethod
    def journal_end(self) -> str:
        """Return a position: whatever is confirmed after this call is found by reading after it."""

    @abstractmethod
    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        """Return the next entries in an order that never leaves one out; empty at the end."""

    @abstractmethod
    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:
        """Return the first final entry (dispatched, cancelled, dead-lettered) of each of these ids that has one.

        ``since`` is a position from before they were scheduled, or ``FROM_THE_START``.
        """

    # -- life ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def check(self) -> str:
        """Connect for real and return one line about what was found."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections."""


def _require_distinct_ids(messages: Sequence[Message]) -> Sequence[Message]:
    seen: set[str] = set()
    for message in messages:
        if message.id in seen:
            raise InvalidMessageError(
                "message_id", f"{message.id!r} is given twice in one call", "use one id a message"
            )
        seen.add(message.id)
    return messages
