"""The port: what every broker can do, in the same words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import TracebackType
from typing import Self

from airflow_delay_provider.brokers.shared_consumer import SharedConsumer
from airflow_delay_provider.domain.clock import Clock, SystemClock
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters, Replayed
from airflow_delay_provider.domain.journal import FROM_THE_START, JournalEntry
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One sentence about a topology."""

    text: str
    #: Messages may be refused, lost, early or stuck; otherwise it is advice.
    is_problem: bool = True


class Provisioned(ABC):
    """A broker on which objects have to exist before messages can wait there."""

    @abstractmethod
    def create_topology(self, channels: Sequence[str] = ()) -> str:
        """Create what is missing, and the way to these channels; return the name of the whole."""

    @abstractmethod
    def verify_topology(self) -> list[Finding]:
        """Say what is wrong or needs care; nothing is changed."""

    @abstractmethod
    def delete_topology(self, *, even_if_messages_wait: bool = False) -> str:
        """Take everything away and return its name; refused while messages wait, unless asked for."""


class KeepsUndelivered(ABC):
    """A broker that keeps apart what a channel does not take."""

    @abstractmethod
    def count_refused(self) -> Mapping[str, int] | None:
        """Return how many messages wait for channels that do not take them, by channel; None if nobody can tell."""

    @abstractmethod
    def count_parked(self) -> int:
        """Return how many messages are parked because their channel was gone; none is touched."""

    @abstractmethod
    def count_parked_by_channel(self) -> Mapping[str, int]:
        """Return the same by channel; each message is looked at for it."""

    @abstractmethod
    def replay_parked(self, channels: Sequence[str] = ()) -> Mapping[str, int]:
        """Send parked messages to their channels, those of the given ones or all; return how many, by channel.

        A message leaves the parking once the broker has confirmed it on its way: it is never lost, and one that was
        just on its way when this process died comes twice. What has no channel yet stays.
        """


#: Told how many messages reached which channel, and how late each was, in milliseconds.
OnDispatched = Callable[[Mapping[str, int], Sequence[int]], None]


class Climber(ABC):
    """Moves the waiting messages of one broker on, step by step, until they are due."""

    @abstractmethod
    def run_once(self) -> float:
        """Do what there is to do now, in bounded time, and return the seconds until the next look.

        After an error it may be called again and begins anew with what is committed.
        """

    @property
    def trouble(self) -> str | None:
        """What a person should know of although it goes on; None is nothing."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Finish what is begun and let others take over."""


class Climbed(ABC):
    """A broker that keeps messages but has no clock for them, so that a dispatcher moves them."""

    @abstractmethod
    def open_climber(self, *, instance: str | None = None, on_dispatched: OnDispatched | None = None) -> Climber:
        """Return what a dispatcher runs; any number may run side by side.

        :param instance: a name that only this one has, also after a restart, so that it goes on at once.
        """


class Broker(ABC):
    """A broker that delays. Calls return after the broker confirmed and raise ``BrokerError`` otherwise."""

    #: Whether the broker sees that an id is taken, so that conflict policies hold.
    knows_ids = True
    #: Whether a waiting message can be cancelled, rescheduled and expedited.
    can_recall = True

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
        self.check_messages(messages)
        return self._schedule(messages, on_conflict)

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Refuse what ``schedule`` would refuse without a look at other messages; nothing is written."""
        now = self.clock.now()
        for message in messages:
            try:
                self.check_message(message, now=now)
            except InvalidMessageError as error:
                if len(messages) > 1:
                    error.args = (f"message {message.id!r}: {error}",)
                raise
        _require_distinct_ids(messages)

    def check_message(self, message: Message, *, now: datetime) -> None:
        """Refuse one message that is too soon, too far, too large, or not of a form that the broker can carry."""
        self.limits.check(message, now=now)

    def send(self, messages: Sequence[Message]) -> list[Receipt]:
        """Put all messages into their channels now, whatever their due time was; the same id again is kept."""
        for message in messages:
            self.limits.check_payload(message)
        _require_distinct_ids(messages)
        return self._send(messages)

    def check_channels(self, channels: Iterable[str]) -> None:  # noqa: B027 - nothing to do is an answer
        """Raise where a channel cannot receive messages; embedded channels always can."""

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
    def receive(
        self,
        channel: str,
        *,
        limit: int = 1,
        visibility: timedelta = DEFAULT_VISIBILITY,
        wait: timedelta = timedelta(0),
    ) -> list[Delivery]:
        """Hand out up to ``limit`` messages; unsettled ones come again after ``visibility``.

        ``wait`` is how long a broker may wait for the first one, where a shared consumer has to hand it over.
        """

    @abstractmethod
    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        """Return up to ``limit`` messages that could be received now, leaving them where they are.

        Refused where the broker would count it as a delivery.
        """

    @abstractmethod
    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        """Return a consumer for all who wait in this process; ``on_change`` is called from any thread when it has news.

        It uses the connections of this broker, so it is closed first.
        """

    def counts_returns(self) -> bool:
        """Whether a message that was received and released has used up one of the deliveries its channel allows."""
        return False

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

    # -- replay --------------------------------------------------------------------------------------------------

    @abstractmethod
    def count_dead(self, selection: DeadLetters) -> DeadCount:
        """Return how many messages :meth:`replay` would post again; nothing is changed."""

    @abstractmethod
    def replay(self, selection: DeadLetters) -> Replayed:
        """Hand messages that were given up to their own channels again, due now, with a handled count of none.

        They leave the dead-letter channel. An id that is not among the messages that were given up is named in the
        result and changes nothing.
        """

    # -- journal -------------------------------------------------------------------------------------------------

    @abstractmethod
    def journal_end(self) -> str:
        """Return a position: whatever is confirmed after this call is found by reading after it."""

    def outcomes_begin(self) -> str:
        """Return where to look for the outcomes of messages that this task schedules now, or has in an earlier try.

        Who knows ids finds the end of a message wherever it lies; for the others an earlier try is over.
        """
        return FROM_THE_START if self.knows_ids else self.journal_end()

    @abstractmethod
    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        """Return the next entries in an order that never leaves one out; empty at the end."""

    @abstractmethod
    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:
        """Return the first final entry (dispatched, cancelled, dead-lettered) of each of these ids that has one.

        A dead one that is put back has not ended. ``since`` is a position from before they were scheduled, or
        ``FROM_THE_START``.
        """

    # -- life ----------------------------------------------------------------------------------------------------

    def is_like(self, other: Broker) -> bool:
        """Whether both were opened with the same settings, secrets included, so that one can stand for the other."""
        return type(self) is type(other) and self.limits == other.limits and self._settings() == other._settings()

    @abstractmethod
    def _settings(self) -> object:
        """Return what the connection says, to be compared and never shown."""

    @abstractmethod
    def check(self) -> str:
        """Connect for real and return one line about what was found."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections."""


def _require_distinct_ids(messages: Sequence[Message]) -> None:
    seen: set[str] = set()
    for message in messages:
        if message.id in seen:
            raise InvalidMessageError(
                "message_id", f"{message.id!r} is given twice in one call", "use one id a message"
            )
        seen.add(message.id)
