"""Which messages that were given up are meant, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime

from airflow_delay_provider.domain.message import Message, require_aware, require_channel, require_message_id
from airflow_delay_provider.exceptions import InvalidMessageError


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetters:
    """A selection of messages that were given up; what is not given does not matter, but something must be."""

    message_ids: tuple[str, ...] = ()
    #: The channel that the messages belong to.
    channel: str | None = None
    #: Where consumers put them; None is the channel's name with ``.dead`` behind it.
    dead_letter_channel: str | None = None
    dag_id: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    #: Text that the reason contains.
    reason: str | None = None
    #: Given up at this moment or later.
    since: datetime | None = None
    #: Given up before this moment.
    until: datetime | None = None

    def __post_init__(self) -> None:
        if not any(getattr(self, field.name) for field in fields(self)):
            raise InvalidMessageError(
                "replay", "nothing says which messages are meant", "give ids, a channel, a DAG, a reason or a time"
            )
        for message_id in self.message_ids:
            require_message_id(message_id)
        for channel in (self.channel, self.dead_letter_channel):
            if channel is not None:
                require_channel(channel)
        for name in ("since", "until"):
            if (moment := getattr(self, name)) is not None:
                object.__setattr__(self, name, require_aware(name, moment))
        object.__setattr__(self, "message_ids", tuple(dict.fromkeys(self.message_ids)))

    @property
    def is_whole_channel(self) -> bool:
        """Whether everything in a dead-letter channel is meant."""
        named = {"channel", "dead_letter_channel"}
        return not any(getattr(self, field.name) for field in fields(self) if field.name not in named)

    def includes(self, message: Message, *, reason: str | None, at: datetime | None) -> bool:
        """Whether a message that was given up for this reason at that moment is meant."""
        origin = message.origin
        return (
            (not self.message_ids or message.id in self.message_ids)
            and self.channel in (None, message.channel)
            and all(
                wanted is None or (origin is not None and getattr(origin, name) == wanted)
                for name, wanted in (("dag_id", self.dag_id), ("run_id", self.run_id), ("task_id", self.task_id))
            )
            and (self.reason is None or self.reason in (reason or ""))
            and (self.since is None or (at is not None and at >= self.since))
            and (self.until is None or (at is not None and at < self.until))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadCount:
    """How many messages a selection includes."""

    count: int
    #: Otherwise there are at most so many: the broker does not show messages without handing them out.
    is_exact: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a replay did."""

    count: int
    #: Ids that were asked for and are not among the messages that were given up.
    missing: tuple[str, ...] = ()
    #: Otherwise more messages lie behind those that could be looked at; replay again once these are gone.
    is_complete: bool = True
