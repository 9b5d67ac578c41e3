"""Commands for messages that wait: cancel, reschedule, expedite.

A command names the very record that a message waits in. The dispatcher of that lane obeys it if that record is not done
by then, and refuses it otherwise, in the transaction in which it says so: there is no moment in which a message is
both recalled and dispatched. A message that is moved to another time goes on from the command itself, which carries it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from struct import Struct

from airflow_delay_provider.brokers.kafka.wire import MAX_MS, MAX_REASON_LENGTH, MIN_MS
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import require_channel, require_message_id

_LENGTH = Struct(">I")
_RECALLS = {Change.CANCELLED, Change.RESCHEDULED, Change.EXPEDITED}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a message waits: one record."""

    topic: str
    lane: int
    offset: int

    def key(self) -> bytes:
        """Return it as the key under which it is remembered as recalled."""
        return f"{self.topic}:{self.offset}".encode()

    @classmethod
    def from_key(cls, key: bytes, lane: int) -> Place:
        """Undo :meth:`key`."""
        topic, _, offset = key.decode().rpartition(":")
        return cls(topic=topic, lane=lane, offset=int(offset))


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command."""

    id: str
    change: Change
    message_id: str
    channel: str
    place: Place
    #: The due time after it; of a cancelled message the one it had.
    deliver_at_ms: int
    #: The message with its new due time; empty for one that is cancelled.
    envelope: bytes = b""

    def write(self) -> bytes:
        """Return the value of its record."""
        head = json.dumps(
            {
                "id": self.id,
                "change": self.change.value,
                "message_id": self.message_id,
                "channel": self.channel,
                "topic": self.place.topic,
                "lane": self.place.lane,
                "offset": self.place.offset,
                "deliver_at_ms": self.deliver_at_ms,
            }
        ).encode()
        return _LENGTH.pack(len(head)) + head + self.envelope

    @classmethod
    def read(cls, value: bytes) -> Command:
        """Undo :meth:`write`; raises ``ValueError`` for anything else."""
        try:
            (length,) = _LENGTH.unpack_from(value)
            start = _LENGTH.size
            head = json.loads(value[start : start + length])
            change = Change(head["change"])
            if change not in _RECALLS:
                raise ValueError(f"{change.value} is no command")
            deliver_at_ms = int(head["deliver_at_ms"])
            if not MIN_MS <= deliver_at_ms <= MAX_MS:
                raise ValueError(f"{deliver_at_ms} is in no calendar")
            place = Place(topic=str(head["topic"]), lane=int(head["lane"]), offset=int(head["offset"]))
            return cls(
                id=require_message_id(head["id"]),
                change=change,
                message_id=require_message_id(head["message_id"]),
                channel=require_channel(head["channel"]),
                place=place,
                deliver_at_ms=deliver_at_ms,
                envelope=value[start + length :],
            )
        except Exception as error:
            raise ValueError(f"not a command: {str(error)[:MAX_REASON_LENGTH]}") from error
