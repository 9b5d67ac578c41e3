"""Positions in a journal as text: where an incremental read begins and ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import ConfigurationError

#: Between a ledger's journal and a connection, if only the messages of that connection are read.
OF_CONNECTION = ", messages of "


@dataclass(frozen=True, kw_only=True)
class JournalPosition:
    """A place between two entries of one journal."""

    #: Which journal it is; a position of another one is refused.
    journal: str
    taken_at_ms: int
    #: The last number that is before it: of a transaction and an entry in a ledger, or of a record in each partition.
    numbers: tuple[int, ...]

    @property
    def taken_at(self) -> datetime:
        """When it was taken, by the clock of who took it."""
        return from_ms(self.taken_at_ms)

    def __str__(self) -> str:
        return json.dumps({"journal": self.journal, "taken_at_ms": self.taken_at_ms, "numbers": list(self.numbers)})

    @classmethod
    def parse(cls, option: str, text: str) -> JournalPosition:
        """Undo ``str``; errors name the option."""
        try:
            given = json.loads(text)
            position = cls(
                journal=str(given["journal"]),
                taken_at_ms=int(given["taken_at_ms"]),
                numbers=tuple(int(number) for number in given["numbers"]),
            )
        except (ValueError, KeyError, TypeError):
            position = None
        if position is None:
            raise ConfigurationError(f"{option}: {text[:200]!r} is no position; use one that journal_end() returned")
        return position

    def overlaps(self, other: JournalPosition) -> bool:
        """Whether entries are in both journals: a ledger's own has those of each connection that it holds, too."""
        mine, theirs = self.journal, other.journal
        return mine == theirs or mine.startswith(theirs + OF_CONNECTION) or theirs.startswith(mine + OF_CONNECTION)

    def require_same_journal(self, option: str, other: JournalPosition) -> None:
        """Refuse to continue in another journal than the one of this position."""
        if self.journal != other.journal or len(self.numbers) != len(other.numbers):
            raise ConfigurationError(
                f"{option}: is a position of the journal {self.journal!r}, but this connection has {other.journal!r};"
                " the journal was deleted and created again, or the connection changed: read it without this option"
            )
