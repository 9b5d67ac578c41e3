"""What the entries of another broker's journal mean for one message that this broker holds; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import TRANSITIONS, Change, State, outcome_of
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.ledger.records import AnyRow

#: What tells one entry of a message from the others: the change, when, and the due time after it.
EntryKey = tuple[str, int, int]


def key_of(entry: JournalEntry) -> EntryKey:
    """Return the same for the same entry read again."""
    return entry.change.value, floor_ms(entry.at), ceil_ms(entry.deliver_at)


@dataclass(kw_only=True, slots=True)
class Followed:
    """One message while a page of entries is applied to it."""

    channel: str
    state: State
    deliver_at_ms: int
    handled_count: int
    dispatched_at_ms: int | None
    updated_at_ms: int
    #: When it was first told of.
    first_at_ms: int
    generation: int = 0
    #: The number of its row, None is no row yet.
    seq: int | None = None
    #: The state that its row has.
    before: State | None = None
    #: Content that its row does not have.
    message: Message | None = None
    recorded: set[EntryKey] = field(default_factory=set)

    @classmethod
    def from_row(cls, row: AnyRow) -> Self:
        """Go on with what is known."""
        state = State(row.state)
        return cls(
            channel=row.channel,
            state=state,
            deliver_at_ms=row.deliver_at_ms,
            handled_count=row.handled_count,
            dispatched_at_ms=row.dispatched_at_ms,
            updated_at_ms=row.updated_at_ms,
            first_at_ms=row.scheduled_at_ms,
            generation=row.generation,
            seq=row.seq,
            before=state,
        )

    @classmethod
    def from_entry(cls, entry: JournalEntry) -> Self:
        """Begin with whatever is told first: the journal may begin after the message was scheduled."""
        message = entry.message or Message(
            id=entry.message_id, channel=entry.channel, payload=b"", deliver_at=entry.deliver_at
        )
        return cls(
            channel=message.channel,
            state=outcome_of(entry.change),
            deliver_at_ms=ceil_ms(entry.deliver_at),
            handled_count=message.handled_count,
            dispatched_at_ms=floor_ms(entry.at) if entry.change is Change.DISPATCHED else None,
            updated_at_ms=floor_ms(entry.at),
            first_at_ms=floor_ms(entry.at),
            message=message,
            recorded={key_of(entry)},
        )

    def apply(self, entry: JournalEntry) -> bool:
        """Change as the entry says and return True, or return False when it is no news."""
        if not self._is_news(entry):
            return False
        match entry.change:
            case Change.DISPATCHED:
                self.dispatched_at_ms = floor_ms(entry.at)
            case Change.REQUEUED:
                self.dispatched_at_ms = None
                self.handled_count = 0 if self.state is State.DEAD else self.handled_count + 1
            case Change.RESCHEDULED:
                # Replacing a message is told so, too.
                self.message = entry.message or self.message
        if entry.change is not Change.DISPATCHED:
            self.generation += 1
        if entry.message is not None:
            self.handled_count = entry.message.handled_count
        self.state = outcome_of(entry.change)
        self.deliver_at_ms, self.updated_at_ms = ceil_ms(entry.deliver_at), floor_ms(entry.at)
        self.recorded.add(key_of(entry))
        return True

    def values(self) -> dict[str, Any]:
        """Return the columns that entries change."""
        return {
            "state": self.state.value,
            "deliver_at_ms": self.deliver_at_ms,
            "handled_count": self.handled_count,
            "generation": self.generation,
            "updated_at_ms": self.updated_at_ms,
            "dispatched_at_ms": self.dispatched_at_ms,
        }

    def _is_news(self, entry: JournalEntry) -> bool:
        """Anything may be told twice: a broker that was not sure sends twice, and a journal may be read again."""
        if (self.state, entry.change) not in TRANSITIONS:
            return False
        count = None if entry.message is None else entry.message.handled_count
        if entry.change is Change.DISPATCHED:
            # An earlier delivery comes again with a lower count, or with another due time and before this one is due.
            return (count is None or count >= self.handled_count) and (
                ceil_ms(entry.deliver_at) == self.deliver_at_ms or floor_ms(entry.at) >= self.deliver_at_ms
            )
        if entry.change is Change.REQUEUED and self.state is State.DISPATCHED and count is not None:
            return count > self.handled_count and key_of(entry) not in self.recorded
        return key_of(entry) not in self.recorded
