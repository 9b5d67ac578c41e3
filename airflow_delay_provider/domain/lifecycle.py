"""The states of a message, the changes that each state allows, and the journal entries that record them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum

from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.message import Message

#: How long a sender may take for one batch before another one sends it too.
CLAIM = timedelta(seconds=60)
#: The position before the first entry.
FROM_THE_START = ""
#: A page of a journal ends with the entry that makes its messages this large.
JOURNAL_PAGE_BYTES = 16 * 1024 * 1024


class State(IntEnum):
    """The state of a message; filters accept names and numbers, and the ledger stores the numbers."""

    SCHEDULED = 100
    DISPATCHED = 101
    CANCELLED = 102
    DEAD = 103

    @classmethod
    def parse(cls, text: str) -> State:
        """Return the state of a name, in upper or lower case, or of a number."""
        try:
            return cls(int(text)) if text.isdigit() else cls[text.upper()]
        except (KeyError, ValueError):
            known = ", ".join(f"{state.name} ({state.value})" for state in cls)
            raise InvalidMessageError("state", f"{text!r} is unknown", f"use one of {known}") from None


class Change(StrEnum):
    """What can happen to a message; also the kinds of journal entries."""

    SCHEDULED = "scheduled"
    DISPATCHED = "dispatched"
    CANCELLED = "cancelled"
    RESCHEDULED = "rescheduled"
    EXPEDITED = "expedited"
    REQUEUED = "requeued"
    DEAD_LETTERED = "dead_lettered"
    #: The channel has not accepted it yet; the broker tries again.
    REFUSED = "refused"
    #: The channel is gone; the broker keeps the message until it is replayed.
    PARKED = "parked"


#: (from, change) -> to. Everything that is not listed is refused.
TRANSITIONS: dict[tuple[State | None, Change], State] = {
    (None, Change.SCHEDULED): State.SCHEDULED,
    (State.SCHEDULED, Change.DISPATCHED): State.DISPATCHED,
    (State.SCHEDULED, Change.CANCELLED): State.CANCELLED,
    (State.SCHEDULED, Change.RESCHEDULED): State.SCHEDULED,
    (State.SCHEDULED, Change.EXPEDITED): State.SCHEDULED,
    (State.SCHEDULED, Change.DEAD_LETTERED): State.DEAD,
    (State.SCHEDULED, Change.REFUSED): State.SCHEDULED,
    (State.SCHEDULED, Change.PARKED): State.DEAD,
    (State.DISPATCHED, Change.REQUEUED): State.SCHEDULED,
    (State.DISPATCHED, Change.DEAD_LETTERED): State.DEAD,
    (State.DISPATCHED, Change.PARKED): State.DEAD,
    (State.DEAD, Change.REQUEUED): State.SCHEDULED,
}


def allowed_from(change: Change) -> frozenset[State]:
    """Return the states in which ``change`` is allowed."""
    return frozenset(state for state, what in TRANSITIONS if what is change and state is not None)


def outcome_of(change: Change) -> State:
    """Return the one state that ``change`` leads to."""
    return next(to for (_, what), to in TRANSITIONS.items() if what is change)


#: The reason of a dispatch whose time is unknown; its entry has the earliest possible one.
TIME_UNKNOWN = (
    "it was dispatched at this time or later: the broker does not record when, and the journal was not read at once"
)
#: Changes that end the delay of a message.
FINAL_CHANGES = frozenset({Change.DISPATCHED, Change.CANCELLED, Change.DEAD_LETTERED, Change.PARKED})


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalEntry:
    """One change of one message."""

    message_id: str
    change: Change
    at: datetime
    channel: str
    #: The due time in force after the change.
    deliver_at: datetime
    #: Opaque; reading after it continues with the next entry.
    position: str
    reason: str | None = None
    #: The message itself, where the journal carries it.
    message: Message | None = None

    def without_message(self) -> JournalEntry:
        """Return it without the message, which may be large."""
        return self if self.message is None else replace(self, message=None)

    @property
    def lateness(self) -> timedelta | None:
        """How long after its due time the change happened; None if that is unknown."""
        return None if self.reason == TIME_UNKNOWN else self.at - self.deliver_at


def is_full_page(entries: Sequence[JournalEntry], limit: int) -> bool:
    """Whether a page of a journal ended at ``limit`` or at its size, so that more entries may be there already."""
    return len(entries) >= limit or sum(map(size_of_entry, entries)) >= JOURNAL_PAGE_BYTES


def size_of_entry(entry: JournalEntry) -> int:
    """Return the bytes of the payload that an entry carries."""
    return 0 if entry.message is None else len(entry.message.payload)
