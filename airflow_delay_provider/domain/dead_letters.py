"""Select dead letters for a replay, and the result of a replay."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime

from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.message import Message, require_aware, require_channel, require_message_id


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetters:
    """A selection of dead letters; give at least one criterion."""

    message_ids: tuple[str, ...] = ()
    #: The channel that the messages belong to.
    channel: str | None = None
    #: Where consumers put them; None is the channel's name followed by ``.dead``.
    dead_letter_channel: str | None = None
    dag_id: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    #: Text that the reason contains.
    reason: str | None = None
    #: Became dead at this time or later.
    since: datetime | None = None
    #: Became dead before this time.
    until: datetime | None = None

    def __post_init__(self) -> None:
        if not any(getattr(self, field.name) for field in fields(self)):
            raise InvalidMessageError(
                "replay", "no messages are selected", "give ids, a channel, a DAG, a reason or a time"
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
        """Whether a whole dead-letter channel is selected."""
        named = {"channel", "dead_letter_channel"}
        return not any(getattr(self, field.name) for field in fields(self) if field.name not in named)

    def includes(self, message: Message, *, reason: str | None, at: datetime | None) -> bool:
        """Whether a message that became dead for this reason at that time is selected."""
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
    #: Otherwise an upper bound: the broker cannot show messages without delivering them.
    is_exact: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a replay did."""

    count: int
    #: Selected ids that are not dead letters.
    missing: tuple[str, ...] = ()
    #: Otherwise the dead-letter channel has more messages than could be checked; replay again once these are gone.
    is_complete: bool = True
