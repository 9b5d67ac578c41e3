"""Convert messages to rows of the ledger, and back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from sqlalchemy import Row

from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.domain.clock import ceil_ms, from_ms
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message, Origin

if TYPE_CHECKING:
    AnyRow: TypeAlias = Row[*tuple[Any, ...]]
else:
    AnyRow = Row

#: The columns of a :class:`Message`.
MESSAGE_COLUMNS = [
    scheduled_message.c[name]
    for name in [
        "id",
        "channel",
        "payload",
        "deliver_at_ms",
        "key",
        "headers",
        "content_type",
        "priority",
        "handled_count",
        "dag_id",
        "run_id",
        "task_id",
        "map_index",
    ]
]


_SCHEDULED = State.SCHEDULED.value


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageRecord:
    """A message with its state in the ledger."""

    message: Message
    state: State
    scheduled_at: datetime
    updated_at: datetime
    dispatched_at: datetime | None
    #: The connection of the broker it goes to; None is an embedded channel.
    destination: str | None
    generation: int
    #: The broker of ``destination`` holds it; this record comes from its journal.
    held_by_broker: bool = False

    @property
    def lateness(self) -> timedelta | None:
        """How long after its due time it was dispatched."""
        return self.dispatched_at - self.message.deliver_at if self.dispatched_at else None


class StoredRow(NamedTuple):
    """The columns of a row that matter right after it was stored."""

    seq: int
    id: str
    channel: str
    destination: str | None
    deliver_at_ms: int
    #: Above 0: the row was there before and has changed.
    generation: int


_STORED_VALUES = itemgetter(*StoredRow._fields[1:])


def stored_row(row: dict[str, Any], seq: int) -> StoredRow:
    """Return what the database would return of a row that it stored under this number."""
    return StoredRow(seq, *_STORED_VALUES(row))


def row_of(message: Message, *, destination: str | None, now_ms: int) -> dict[str, Any]:
    """Return the row of a scheduled message."""
    origin = message.origin
    return {
        "id": message.id,
        "channel": message.channel,
        "state": _SCHEDULED,
        "deliver_at_ms": ceil_ms(message.deliver_at),
        "scheduled_at_ms": now_ms,
        "updated_at_ms": now_ms,
        "payload": message.payload,
        "content_type": message.content_type,
        "key": message.key,
        "headers": dict(message.headers) or None,
        "priority": message.priority,
        "handled_count": message.handled_count,
        "dag_id": origin.dag_id if origin else None,
        "run_id": origin.run_id if origin else None,
        "task_id": origin.task_id if origin else None,
        "map_index": origin.map_index if origin else None,
        "destination": destination,
        "generation": 0,
    }


def message_of(row: AnyRow, *, extra_handled: int = 0) -> Message:
    """Return the message of a row with ``MESSAGE_COLUMNS``."""
    return Message(
        id=row.id,
        channel=row.channel,
        payload=row.payload,
        deliver_at=from_ms(row.deliver_at_ms),
        key=row.key,
        headers=row.headers or {},
        content_type=row.content_type,
        priority=row.priority,
        handled_count=row.handled_count + extra_handled,
        origin=_origin_of(row),
    )


def record_of(row: AnyRow) -> MessageRecord:
    """Return the record of a whole ``scheduled_message`` row."""
    return MessageRecord(
        message=message_of(row),
        state=State(row.state),
        scheduled_at=from_ms(row.scheduled_at_ms),
        updated_at=from_ms(row.updated_at_ms),
        dispatched_at=None if row.dispatched_at_ms is None else from_ms(row.dispatched_at_ms),
        destination=row.destination,
        generation=row.generation,
        held_by_broker=bool(row.held_by_broker),
    )


def _origin_of(row: AnyRow) -> Origin | None:
    if row.dag_id is None:
        return None
    return Origin(dag_id=row.dag_id, run_id=row.run_id, task_id=row.task_id, map_index=row.map_index)
