"""The ticket: the message that brings the next submission of a Spark job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any
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
        return Message(
            id=self.id,
            channel=channel,
            payload=json.dumps(self.as_json()).encode(),
            deliver_at=self.deliver_at,
            content_type="application/json",
            origin=self.origin,
        )

    @classmethod
    def from_message(cls, message: Message) -> Ticket | None:
        """Undo :meth:`as_message`; None for a message that is no ticket."""
        try:
            return replace(cls.from_json(json.loads(message.payload)), deliver_at=message.deliver_at)
        except (ValueError, KeyError, TypeError):
            return None

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        times = {"began_at": self.began_at.isoformat(), "deliver_at": self.deliver_at.isoformat()}
        return asdict(self) | times | {"waits_for": self.waits_for.value}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Ticket:
        """Undo :meth:`as_json`."""
        return cls(
            origin=Origin(**stored["origin"]),
            began_at=datetime.fromisoformat(stored["began_at"]),
            attempt=stored["attempt"],
            verdict=stored["verdict"],
            reason=stored["reason"],
            cluster=stored["cluster"],
            deliver_at=datetime.fromisoformat(stored["deliver_at"]),
            waits_for=WaitsFor(stored["waits_for"]),
            extension=stored["extension"],
        )
