"""Records of dispatches, held back for the moment in which the broker may add that the message was parked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change

#: How long the record of a parking may take after that of the publish which found no queue. Measured: 5 to 30 ms.
PARKED_SECONDS = 0.5
#: Records behind a dispatch after which none of its parking will come: both are written within milliseconds.
LOOK_AHEAD = 1000


@dataclass(kw_only=True, slots=True)
class Told:
    """One entry as the journal tells it."""

    entry: JournalEntry
    #: The destination may not have taken the message, which its relay keeps then.
    may_be_held: bool = False
    #: When this client read it, in seconds of a clock that never goes back.
    seen: float = 0.0
    was_parked: bool = False

    @property
    def is_dispatch(self) -> bool:
        """Whether it says that the message reached its channel."""
        return self.entry.change is Change.DISPATCHED


class Dispatches:
    """Entries in their order. A dispatch leaves after a moment, and never if the message was parked.

    The broker publishes a message to its queue and to the journal at once. Where the queue is gone, it is parked, and
    a second record says so. Both come by way of a queue, so either may be the first.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._entries: deque[Told] = deque()
        #: The last dispatch of each message that is held back.
        self._dispatched: dict[str, Told] = {}
        #: Messages that were parked lately, and whose dispatch was not told before.
        self._parked: dict[str, None] = {}

    def __iter__(self) -> Iterator[Told]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, told: Told) -> None:
        """Take the next entry."""
        told.seen = self._monotonic()
        name = told.entry.message_id
        match told.entry.change:
            case Change.DISPATCHED if told.may_be_held and name in self._parked:
                del self._parked[name]
                return
            case Change.DISPATCHED:
                self._dispatched[name] = told
            case Change.PARKED if other := self._dispatched.pop(name, None):
                other.was_parked = True
            case Change.PARKED:
                self._parked[name] = None
                if len(self._parked) > LOOK_AHEAD:
                    del self._parked[next(iter(self._parked))]
            case Change.SCHEDULED | Change.REQUEUED:
                self._parked.pop(name, None)
        self._entries.append(told)

    def release(self, limit: int) -> list[Told]:
        """Return the next entries that are known to be true, up to ``limit``."""
        released: list[Told] = []
        ripe = self._monotonic() - PARKED_SECONDS
        while self._entries and len(released) < limit:
            first = self._entries[0]
            is_open = first.is_dispatch and not first.was_parked and first.seen > ripe
            if is_open and len(self._entries) <= LOOK_AHEAD:
                break
            self._entries.popleft()
            if self._dispatched.get(first.entry.message_id) is first:
                del self._dispatched[first.entry.message_id]
            if not first.was_parked:
                released.append(first)
        return released
