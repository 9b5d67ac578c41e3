"""Up to where the records of each partition are not needed any more. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

PartitionId = tuple[str, int]
#: Most entries of one partition; more of them are joined in pairs, which keeps records for longer.
MANY = 400


class Watermarks:
    """For each partition: before which offset all messages have left, as soon as which time is over.

    Both grow from entry to entry. So a record that is due late keeps those behind it, whether or not they are done.
    """

    def __init__(self, entries: Mapping[PartitionId, Sequence[tuple[int, int]]] | None = None) -> None:
        self._entries = {where: list(each) for where, each in (entries or {}).items()}

    def add(self, where: PartitionId, offset: int, held_until_ms: int) -> None:
        """Learn that the records before ``offset`` were read and wait until ``held_until_ms`` at most.

        Learning it twice is no different from learning it once.
        """
        entries = self._entries.setdefault(where, [])
        if entries and entries[-1][0] >= offset:
            return
        if entries and entries[-1][1] >= held_until_ms:
            entries[-1] = (offset, entries[-1][1])
        else:
            entries.append((offset, held_until_ms))
        if len(entries) > MANY:
            self._entries[where] = entries[1::2] if len(entries) % 2 == 0 else [entries[0], *entries[2::2]]

    def at(self, now_ms: int) -> Iterator[tuple[str, int, int]]:
        """Return topic, partition and offset before which no message waits at this time, where known; forget these."""
        for (topic, partition), entries in self._entries.items():
            done = bisect_right(entries, now_ms, key=lambda entry: entry[1])
            if done:
                yield topic, partition, entries[done - 1][0]
                # The last one stays, so that nothing before it is added again.
                del entries[: done - 1]

    def to_json(self) -> list[Any]:
        """Return it in a form for JSON."""
        return [[topic, partition, entries] for (topic, partition), entries in sorted(self._entries.items())]

    @classmethod
    def from_json(cls, data: Iterable[Any]) -> Watermarks:
        """Undo :meth:`to_json`."""
        return cls({(topic, partition): [(each[0], each[1]) for each in entries] for topic, partition, entries in data})
