"""The states of a message and the one table of what may happen to it."""

from __future__ import annotations

from enum import IntEnum, StrEnum

from airflow_delay_provider.exceptions import InvalidMessageError


class State(IntEnum):
    """Where a message is; the numbers are stored and accepted wherever a state is filtered by."""

    SCHEDULED = 100
    DISPATCHED = 101
    CANCELLED = 102
    DEAD = 103

    @classmethod
    def parse(cls, text: str) -> State:
        """Accept a name in any case or the numeric code."""
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
    #: The channel has not taken it yet; it waits on, and the broker tries again.
    REFUSED = "refused"
    #: The channel is gone; the broker keeps it apart until somebody replays it.
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


#: Changes after which a message waits no longer.
FINAL_CHANGES = frozenset({Change.DISPATCHED, Change.CANCELLED, Change.DEAD_LETTERED, Change.PARKED})
