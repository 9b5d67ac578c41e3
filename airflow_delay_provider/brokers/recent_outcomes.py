"""What a reader of a journal remembers, so that those who begin to wait need no reading back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Generic, Protocol, Self, TypeVar

from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import FINAL_CHANGES, Change

#: Final entries that a reader remembers.
REMEMBERED = 20_000
#: Ends from which a message can be put back.
WAYS_BACK = frozenset({Change.DEAD_LETTERED, Change.PARKED})


def note_outcome(ends: MutableMapping[str, JournalEntry], entry: JournalEntry) -> None:
    """Note how a message first ended; a dead or parked one that is put back has not ended."""
    known = ends.get(entry.message_id)
    if entry.change in FINAL_CHANGES:
        if known is None or known.change is Change.PARKED:
            ends[entry.message_id] = entry
    elif entry.change is Change.REQUEUED and known is not None and known.change in WAYS_BACK:
        del ends[entry.message_id]


class _Ordered(Protocol):
    def __ge__(self, other: Self, /) -> bool: ...


PositionT = TypeVar("PositionT", bound=_Ordered)


class RecentOutcomes(Generic[PositionT]):
    """The first final entry of each message that was read lately."""

    def __init__(self, parse_position: Callable[[str], PositionT], start: PositionT | None = None) -> None:
        self._parse_position = parse_position
        #: Nothing final behind this position is unknown here; None is nowhere.
        self._known_from = start
        self._entries: OrderedDict[str, JournalEntry] = OrderedDict()

    def covers(self, start: PositionT) -> bool:
        """Whether every outcome between ``start`` and the last entry added is remembered."""
        return self._known_from is not None and start >= self._known_from

    def add(self, entries: Sequence[JournalEntry]) -> None:
        """Remember those that are final; they follow on those added before."""
        for entry in entries:
            note_outcome(self._entries, entry)
        while len(self._entries) > REMEMBERED:
            _, forgotten = self._entries.popitem(last=False)
            self._known_from = self._parse_position(forgotten.position)

    def get(self, message_ids: Sequence[str]) -> dict[str, JournalEntry]:
        """Return the outcomes that are known."""
        return {each: self._entries[each] for each in message_ids if each in self._entries}
