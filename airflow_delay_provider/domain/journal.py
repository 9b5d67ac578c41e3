"""What the journal of a broker records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message

#: The position before everything.
FROM_THE_START = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalEntry:
    """One thing that happened to one message."""

    message_id: str
    change: Change
    at: datetime
    channel: str
    #: The due time in force after the change.
    deliver_at: datetime
    #: Opaque; reading after it continues behind this entry.
    position: str
    reason: str | None = None
    #: The message itself, where the journal carries it.
    message: Message | None = None

    @property
    def lateness(self) -> timedelta:
        """How long after its due time this happened."""
        return self.at - self.deliver_at
