"""What a reader of a journal remembers, so that those who begin to wait need no reading back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import FINAL_CHANGES

#: Final entries that a reader remembers.
REMEMBERED = 20_000


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
            if entry.change in FINAL_CHANGES:
                self._entries.setdefault(entry.message_id, entry)
        while len(self._entries) > REMEMBERED:
            _, forgotten = self._entries.popitem(last=False)
            self._known_from = self._parse_position(forgotten.position)

    def get(self, message_ids: Sequence[str]) -> dict[str, JournalEntry]:
        """Return the outcomes that are known."""
        return {each: self._entries[each] for each in message_ids if each in self._entries}
