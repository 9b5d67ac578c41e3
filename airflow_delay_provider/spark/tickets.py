"""The ticket: the message that brings the next submission of a Spark job."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from uuid import UUID, uuid5

from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.message import Message, Origin

#: Where tickets go. Nobody has to read it: the journal tells who waits.
DEFAULT_CHANNEL = "delay.retries"
DEFAULT_DEAD_LETTER_CHANNEL = "delay.retries.dead"


class WaitsFor(StrEnum):
    """Why a ticket is not due yet."""

    BACKOFF = "backoff"
    #: The cluster is down: extended without burning an attempt.
    CLUSTER = "cluster"
    #: Many come back at once: each has its turn.
    TURN = "turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """One waiting submission."""

    origin: Origin
    #: Tells the tickets of a task that was cleared from those of its life before.
    began_at: datetime
    #: Number of the submission that it brings.
    attempt: int
    verdict: str
    reason: str
    cluster: str
    deliver_at: datetime
    waits_for: WaitsFor = WaitsFor.BACKOFF
    #: How often it was extended.
    extension: int = 0

    @property
    def id(self) -> str:
        """The same for the same wait, however often it is scheduled."""
        wait = f"{ceil_ms(self.began_at)}.{self.extension}"
        return str(uuid5(UUID(self.origin.message_id(self.attempt)), wait))

    def extended(self, deliver_at: datetime, waits_for: WaitsFor) -> Ticket:
        """Return the one that follows when the submission cannot begin yet."""
        return replace(self, deliver_at=deliver_at, waits_for=waits_for, extension=self.extension + 1)

    def as_message(self, channel: str) -> Message:
        """Return it as a broker takes it."""
        content = {
            "attempt": self.attempt,
            "verdict": self.verdict,
            "reason": self.reason,
            "cluster": self.cluster,
            "waits_for": self.waits_for.value,
            "extension": self.extension,
            "began_at": self.began_at.isoformat(),
        }
        return Message(
            id=self.id,
            channel=channel,
            payload=json.dumps(content).encode(),
            deliver_at=self.deliver_at,
            content_type="application/json",
            origin=self.origin,
        )

    @classmethod
    def from_message(cls, message: Message) -> Ticket | None:
        """Undo :meth:`as_message`; None for a message that is no ticket."""
        try:
            content = json.loads(message.payload)
            if message.origin is None:
                return None
            return cls(
                origin=message.origin,
                began_at=datetime.fromisoformat(content["began_at"]),
                attempt=content["attempt"],
                verdict=content["verdict"],
                reason=content["reason"],
                cluster=content["cluster"],
                deliver_at=message.deliver_at,
                waits_for=WaitsFor(content["waits_for"]),
                extension=content["extension"],
            )
        except (ValueError, KeyError, TypeError):
            return None
