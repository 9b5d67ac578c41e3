"""How the journal is written: one record holds all entries of one lane and one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from airflow_delay_provider.brokers.kafka.wire import Envelope, clean_reason, write_key
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change

#: What happened, when, the due time after it, then the lengths of id, channel, reason and envelope.
_ENTRY = Struct(">BqqHHHI")
_CODES = {
    Change.SCHEDULED: 1,
    Change.DISPATCHED: 2,
    Change.CANCELLED: 3,
    Change.RESCHEDULED: 4,
    Change.EXPEDITED: 5,
    Change.REQUEUED: 6,
    Change.DEAD_LETTERED: 7,
    Change.REFUSED: 8,
    Change.PARKED: 9,
}
_CHANGES = {code: change for change, code in _CODES.items()}
#: The answer to a command: its id, and in place of a reason whether it was obeyed.
_ANSWER = 100


@dataclass(frozen=True, slots=True)
class Answer:
    """What a dispatcher says to a command."""

    command_id: str
    obeyed: bool


@dataclass(frozen=True, slots=True)
class Noted:
    """One entry as it stands in the journal; the message in it is read only when somebody asks for it."""

    code: int
    at_ms: int
    deliver_at_ms: int
    message_id: bytes
    channel: bytes
    reason: bytes
    envelope: bytes

    @property
    def answer(self) -> Answer | None:
        """The answer to a command, where it is one."""
        return Answer(self.message_id.decode(), bool(self.reason)) if self.code == _ANSWER else None

    @property
    def change(self) -> Change | None:
        """What happened; None for what is not for readers of the journal."""
        return _CHANGES.get(self.code)

    def entry(self, position: str) -> JournalEntry:
        """Return it for a reader."""
        wired = Envelope(write_key(0, "") + self.message_id, self.envelope).read() if self.envelope else None
        return JournalEntry(
            message_id=self.message_id.decode(),
            change=_CHANGES[self.code],
            at=from_ms(self.at_ms),
            channel=self.channel.decode(),
            deliver_at=from_ms(self.deliver_at_ms),
            position=position,
            reason=self.reason.decode() or None,
            message=None if wired is None else wired.message,
        )


def write_entry(
    change: Change,
    *,
    at_ms: int,
    deliver_at_ms: int,
    message_id: bytes,
    channel: str,
    reason: str | None = None,
    envelope: bytes = b"",
) -> bytes:
    """Return one entry."""
    where, why = channel.encode(), b"" if reason is None else clean_reason(reason).encode()
    head = _ENTRY.pack(_CODES[change], at_ms, deliver_at_ms, len(message_id), len(where), len(why), len(envelope))
    return b"".join((head, message_id, where, why, envelope))


def write_answer(command_id: str, *, at_ms: int, obeyed: bool) -> bytes:
    """Return the answer to a command."""
    who, what = command_id.encode(), b"obeyed" if obeyed else b""
    return _ENTRY.pack(_ANSWER, at_ms, 0, len(who), 0, len(what), 0) + who + what


def is_answer(entry: bytes) -> bool:
    """Whether somebody waits for this entry."""
    return entry[0] == _ANSWER


def read_entries(value: bytes) -> Iterator[Noted]:
    """Return the entries of one record."""
    start = 0
    while start < len(value):
        code, at_ms, deliver_at_ms, *lengths = _ENTRY.unpack_from(value, start)
        start += _ENTRY.size
        parts = []
        for length in lengths:
            parts.append(value[start : start + length])
            start += length
        yield Noted(code, at_ms, deliver_at_ms, *parts)
