"""The port: what every broker can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from airflow_delay_provider.domain.arguments import Limits, OnConflict
from airflow_delay_provider.domain.clock import Clock, SystemClock
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters, Replayed
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, JournalEntry
from airflow_delay_provider.domain.message import Delivery, Message

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.consumer import SharedConsumer
    from airflow_delay_provider.brokers.ledger.database import Ledger

DEFAULT_VISIBILITY = timedelta(minutes=5)


class Outcome(StrEnum):
    """What a confirmed ``schedule`` did with one message."""

    SCHEDULED = "scheduled"
    #: It was due and is in its channel.
    DISPATCHED = "dispatched"
    #: The id was taken: nothing new was stored.
    KEPT = "kept"
    #: The scheduled message with this id was replaced.
    REPLACED = "replaced"


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The broker's confirmation for one message."""

    message_id: str
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyIssue:
    """One result of verifying a topology."""

    text: str
    #: Messages may be refused, lost, early or stuck; otherwise it is a recommendation.
    is_problem: bool = True


class HasTopology(ABC):
    """A broker that needs queues, exchanges or topics to delay messages."""

    @abstractmethod
    def create_topology(self, channels: Sequence[str] = ()) -> str:
        """Create missing objects, and the routes to these channels; return the name of the topology."""

    @abstractmethod
    def require_topology(self) -> None:
        """Create the topology if it does not exist, as the first message would."""

    @abstractmethod
    def create_channel(self, channel: str) -> None:
        """Create the queue or topic of a channel unless it exists."""

    @abstractmethod
    def verify_topology(self) -> list[TopologyIssue]:
        """Return problems and recommendations; change nothing."""

    @abstractmethod
    def delete_topology(self, *, even_if_messages_wait: bool = False) -> str:
        """Delete all objects and return the name of the topology; refused while it contains delayed messages."""


class KeepsUndelivered(ABC):
    """A broker that keeps messages that a channel does not accept."""

    @abstractmethod
    def count_refused(self) -> Mapping[str, int] | None:
        """Return how many messages wait for channels that do not accept them, by channel; None if it is unknown."""

    @abstractmethod
    def count_parked(self) -> int:
        """Return how many messages are parked because their channel is gone."""

    @abstractmethod
    def count_parked_by_channel(self) -> Mapping[str, int]:
        """Return the same by channel; this reads every parked message."""

    @abstractmethod
    def replay_parked(self, channels: Sequence[str] = ()) -> Mapping[str, int]:
        """Send parked messages to their channels, all or those of the given ones; return how many, by channel.

        A message leaves the parking queue once the broker has confirmed that it was sent: a crash in between repeats it
        and never loses it. Messages whose channel is still missing stay.
        """


#: Called with the number of dispatched messages by channel, and how late each was, in milliseconds.
OnDispatched = Callable[[Mapping[str, int], Sequence[int]], None]


class LadderDispatcher(ABC):
    """Moves the delayed messages of one broker from rung to rung until they are due."""

    @abstractmethod
    def run_once(self) -> float:
        """Do what there is to do now, in bounded time, and return the seconds until the next run.

        After an error it may be called again and continues from what is committed.
        """

    @property
    def trouble(self) -> str | None:
        """A problem that needs attention although it runs; None if there is none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Finish, and let other dispatchers take over."""


class NeedsDispatcher(ABC):
    """A broker that stores delayed messages and needs a dispatcher to deliver them."""

    @abstractmethod
    def open_ladder_dispatcher(
        self, *, instance: str | None = None, on_dispatched: OnDispatched | None = None
    ) -> LadderDispatcher:
        """Return what a dispatcher runs; any number of them share the work.

        :param instance: a unique name that survives restarts; with it, a restarted one continues at once.
        """


class Closeable(ABC):
    """Closed at the end of a ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close connections."""


class Broker(Closeable):
    """A broker that delays messages. Calls return once the broker has confirmed, or raise ``BrokerError``."""

    #: Whether the broker can check that an id is taken, so that it supports conflict policies.
    knows_ids = True
    #: Whether a scheduled message can be cancelled, rescheduled and expedited.
    can_recall = True
    #: The ledger that holds its delayed messages; None if the broker holds them itself.
    ledger: Ledger | None = None
    #: The connection of the broker to which messages go from that ledger; None if they stay in it.
    destination: str | None = None

    def __init__(self, *, limits: Limits | None = None, clock: Clock | None = None) -> None:
        self.limits = limits or Limits()
        self.clock = clock or SystemClock()

    # -- scheduling ----------------------------------------------------------------------------------------------

    def schedule(self, messages: Sequence[Message], *, on_conflict: OnConflict = OnConflict.KEEP) -> list[Receipt]:
        """Store all messages or none; a message that is due goes straight to its channel.

        A message that would overtake an earlier one of its channel and key waits for it.
        """
        self.check_messages(messages)
        return self._schedule(messages, on_conflict)

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Refuse what ``schedule`` would refuse, except for conflicts with other messages; write nothing."""
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
        """Refuse a message that is too soon, too far, too large, or that the broker cannot carry."""
        self.limits.check(message, now=now)

    def send(self, messages: Sequence[Message]) -> list[Receipt]:
        """Put all messages into their channels now, whatever their due time; the same id again is kept."""
        for message in messages:
            self.limits.check_payload(message)
        _require_distinct_ids(messages)
        return self._send(messages)

    def check_channels(self, channels: Iterable[str]) -> None:
        """Raise if a channel cannot receive messages; embedded channels always can."""

    @abstractmethod
    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]: ...

    @abstractmethod
    def _send(self, messages: Sequence[Message]) -> list[Receipt]: ...

    # -- control -------------------------------------------------------------------------------------------------

    @abstractmethod
    def cancel(self, message_ids: Sequence[str]) -> None:
        """Cancel scheduled messages, all or none; cancelling again succeeds."""

    @abstractmethod
    def reschedule(self, message_ids: Sequence[str], deliver_at: datetime) -> None:
        """Move scheduled messages to another due time, all or none."""

    @abstractmethod
    def expedite(self, message_ids: Sequence[str]) -> None:
        """Make scheduled messages due now, all or none."""

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
        """Return up to ``limit`` messages; those that are not settled are delivered again after ``visibility``.

        ``wait`` is how long a broker may wait for the first one, if a shared consumer has to release it.
        """

    @abstractmethod
    def peek(self, channel: str, *, limit: int = 1) -> list[Message]:
        """Return up to ``limit`` messages that could be received now, and leave them in the channel.

        Refused where the broker would count it as a delivery.
        """

    @abstractmethod
    def open_shared_consumer(self, *, on_change: Callable[[], None]) -> SharedConsumer:
        """Return a consumer that all sensors of this process share; it calls ``on_change``, from any thread.

        It uses the connections of this broker, so close it first.
        """

    def counts_returns(self) -> bool:
        """Whether releasing a message uses up one of the deliveries that its channel allows."""
        return False

    @abstractmethod
    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Remove handled messages from their channel."""

    @abstractmethod
    def release(self, deliveries: Sequence[Delivery], *, delay: timedelta = timedelta(0)) -> None:
        """Return messages unhandled; they are delivered again after ``delay``, and their count does not change."""

    @abstractmethod
    def requeue(self, delivery: Delivery, delay: timedelta, *, reason: str | None = None) -> None:
        """Deliver a message again to its own channel after ``delay``, with its handled count raised by one.

        A dead letter starts again with a count of 0.
        """

    @abstractmethod
    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        """Move a message that will not be tried again to the dead-letter ``channel``."""

    # -- replay --------------------------------------------------------------------------------------------------

    @abstractmethod
    def count_dead(self, selection: DeadLetters) -> DeadCount:
        """Return how many messages :meth:`replay` would send; change nothing."""

    @abstractmethod
    def replay(self, selection: DeadLetters) -> Replayed:
        """Send dead letters to their own channels again, due now, with a handled count of 0.

        They leave the dead-letter channel. The result names selected ids that are not dead letters.
        """

    # -- journal -------------------------------------------------------------------------------------------------

    @abstractmethod
    def journal_end(self) -> str:
        """Return a position; reading after it finds every change that is confirmed after this call."""

    def outcomes_begin(self) -> str:
        """Return the position from which to search for the outcomes of messages that a task schedules.

        A broker that knows ids finds the outcomes of an earlier try, too.
        """
        return FROM_THE_START if self.knows_ids else self.journal_end()

    @abstractmethod
    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
        """Return the next entries, in an order that skips none; empty at the end.

        There are at most ``limit``, and fewer if their messages are large (``JOURNAL_PAGE_BYTES``).
        """

    @abstractmethod
    def find_outcomes(self, message_ids: Sequence[str], *, since: str) -> Mapping[str, JournalEntry]:
        """Return the first final entry (dispatched, cancelled, dead-lettered) of each of these ids that has one.

        A dead message that is requeued has no outcome yet. ``since`` is a position before they were scheduled, or
        ``FROM_THE_START``.
        """

    def find_outcomes_of_each(self, since: Mapping[str, str]) -> Mapping[str, JournalEntry]:
        """Do the same for ids that each have a position of their own."""
        found: dict[str, JournalEntry] = {}
        for position in dict.fromkeys(since.values()):
            found |= self.find_outcomes([each for each, own in since.items() if own == position], since=position)
        return found

    # -- life ----------------------------------------------------------------------------------------------------

    def is_like(self, other: Broker) -> bool:
        """Whether both were opened with the same settings, secrets included."""
        return type(self) is type(other) and self.limits == other.limits and self._settings() == other._settings()

    @abstractmethod
    def _settings(self) -> object:
        """Return the settings of the connection, to compare them; never shown."""

    @abstractmethod
    def check(self) -> str:
        """Connect, and return one line about the broker."""

    def clock_skew(self) -> timedelta | None:
        """Return the broker's clock minus this machine's; None if the broker does not tell its time."""
        return None


def _require_distinct_ids(messages: Sequence[Message]) -> None:
    seen: set[str] = set()
    for message in messages:
        if message.id in seen:
            raise InvalidMessageError(
                "message_id", f"{message.id!r} is given twice", "use a different id for each message"
            )
        seen.add(message.id)
