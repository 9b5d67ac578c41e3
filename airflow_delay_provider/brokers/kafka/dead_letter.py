"""What could not be delivered, as a record that can always be stored and holds all that a replay needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.lane import HEADER_BYTES
from airflow_delay_provider.domain.lifecycle import Change

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.commands import Place
    from airflow_delay_provider.brokers.kafka.lane import Record

#: A record that is larger is cut: the topic of the dead takes no more than any topic of the ladder.
MOST_BYTES = 15_000_000
#: What is left of each part of a record that is cut.
CUT_BYTES = 100_000
CUT_KEY_BYTES = 1_000

DeadLetter = tuple[bytes | None, bytes | None, wire.Headers]


def dead_letter_of(place: Place, record: Record, reason: str, *, most_bytes: int = MOST_BYTES) -> DeadLetter:
    """Return key, value and headers.

    A message is written as it would lie in its channel, and its channel is named. Anything else is written as it is. Of
    what is too large the beginning is kept, and a header says so.
    """
    why: wire.Headers = [
        (wire.CHANGE, Change.DEAD_LETTERED.value.encode()),
        (wire.REASON, wire.clean_reason(reason).encode()),
        (wire.SOURCE, f"{place.topic}/{place.lane}/{place.offset}".encode()),
    ]
    try:
        envelope = wire.Envelope(record.key or b"", record.value or b"")
        headers = [*envelope.record_headers(), (wire.CHANNEL, envelope.channel.encode()), *why]
        key, value = envelope.key, envelope.payload
    except Exception:  # noqa: BLE001 - it may be anything
        key, value, headers = record.key, record.value or b"", [*_strangers(record), *why]
    size = len(key or b"") + len(value) + sum(_size_of_header(*each) for each in headers)
    if size <= most_bytes:
        return key, value if value or record.value is not None else None, headers
    kept = [each for each in headers if each not in why and _size_of_header(*each) <= CUT_KEY_BYTES]
    cut = (wire.TRUNCATED, b"%d" % size)
    return _cut_key(key), value[: min(CUT_BYTES, most_bytes)], [*kept[:100], *why, cut]


def _size_of_header(name: str, value: bytes | None) -> int:
    return len(name.encode(errors="replace")) + len(value or b"") + HEADER_BYTES


def _strangers(record: Record) -> wire.Headers:
    """Return the headers of a stranger, but for those that say what this package says of a dead letter."""
    ours = {wire.CHANGE, wire.REASON, wire.SOURCE, wire.TRUNCATED}
    return [(name, value) for name, value in record.headers or [] if name not in ours]


def _cut_key(key: bytes | None) -> bytes | None:
    return None if key is None else key[:CUT_KEY_BYTES]
