"""Plain Kafka records with headers: messages in channels, and requests of other programs in the inbox.

Key and value are those of the user, and the headers hold the rest. The same headers, written by any program, schedule
a message through the inbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from airflow_delay_provider.brokers.kafka.topology import VERSION
from airflow_delay_provider.domain.arguments import MAX_PRIORITY, resolve_deliver_at
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import MAX_CONTENT_TYPE_LENGTH, Message, Origin, require_message_id

ID = "delay-id"
DELIVER_AT = "delay-deliver-at"
DELIVER_AFTER_MS = "delay-deliver-after-ms"
CHANNEL = "delay-channel"
KEY = "delay-key"
SCHEDULED_AT = "delay-scheduled-at"
HANDLED_COUNT = "delay-handled-count"
PRIORITY = "delay-priority"
ORIGIN = "delay-origin"
CONTENT_TYPE = "content-type"
#: Of a requeued message or a dead letter.
CHANGE = "delay-change"
REASON = "delay-reason"
#: Of a dead letter: topic, partition and offset of the original record, and its size if it was cut.
SOURCE = "delay-source"
TRUNCATED = "delay-truncated"

Headers = list[tuple[str, bytes]]
#: Valid names of channels.
CHANNEL_FORM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,248}")
MAX_REASON_LENGTH = 2000
MAX_HEADERS_BYTES = 100_000
#: Overhead of a header besides its name and value.
HEADER_BYTES = 10
#: The last and the first millisecond that a datetime can have.
MAX_MS = floor_ms(datetime.max.replace(tzinfo=UTC))
MIN_MS = ceil_ms(datetime.min.replace(tzinfo=UTC))
DEFAULT_CONTENT_TYPE = "application/octet-stream"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedMessage:
    """A message decoded from a record."""

    message: Message
    scheduled_at: datetime
    change: Change | None
    reason: str | None


def check_message(message: Message) -> None:
    """Refuse a message that a Kafka record cannot contain."""
    require_destination(message.channel)
    if not 0 <= message.priority <= MAX_PRIORITY:
        raise InvalidMessageError("priority", f"{message.priority} is out of range", f"use 0 to {MAX_PRIORITY}")
    if not message.headers and not message.key:
        return
    size = len((message.key or "").encode())
    for name, value in message.headers.items():
        if _is_reserved(name):
            raise InvalidMessageError("headers", f"{name!r} is reserved", "use another name")
        size += len(name.encode()) + len(value.encode())
    if size > MAX_HEADERS_BYTES:
        raise InvalidMessageError(
            "headers", f"{size} bytes of headers and key are too many", "put the data into the payload"
        )


@lru_cache(maxsize=1000)
def check_channel(channel: str) -> None:
    """Refuse a channel that cannot be the name of a topic."""
    if not CHANNEL_FORM.fullmatch(channel):
        raise InvalidMessageError(
            "channel",
            f"{channel[:250]!r} cannot be a Kafka topic",
            "use 1-249 letters, digits and . _ - starting with a letter, digit or _",
        )


@lru_cache(maxsize=1000)
def require_destination(channel: str) -> None:
    """Refuse channels to which messages may not be delivered: Kafka's own topics, and those of any ladder."""
    check_channel(channel)
    if channel.startswith("__"):
        raise InvalidMessageError("channel", f"{channel!r} is one of Kafka's own topics", "use another topic")
    if channel == VERSION or channel.startswith(f"{VERSION}."):
        raise InvalidMessageError("channel", f"{channel!r} belongs to a ladder", "use another topic")


def clean_reason(reason: str) -> str:
    """Return a text that can be stored everywhere."""
    return reason[:MAX_REASON_LENGTH].encode(errors="replace").decode().replace("\0", "")


def decode_message(
    *, topic: str, default_id: str, key: bytes | None, value: bytes | None, headers: Headers | None, timestamp_ms: int
) -> DecodedMessage:
    """Return the message of a record in a channel; invalid headers of other programs are replaced by defaults."""
    given = _by_name(headers)
    channel = _text(given.get(CHANNEL))
    message_id = _text(given.get(ID)) or ""
    content_type = _text(given.get(CONTENT_TYPE)) or ""
    change = _text(given.get(CHANGE))
    message = Message(
        id=message_id if 1 <= len(message_id) <= 255 and message_id.isprintable() else default_id,
        channel=channel if channel and CHANNEL_FORM.fullmatch(channel) else topic,
        payload=value or b"",
        deliver_at=_moment(given.get(DELIVER_AT), timestamp_ms),
        key=_text(key),
        headers=_users_headers(headers),
        content_type=content_type if 1 <= len(content_type) <= MAX_CONTENT_TYPE_LENGTH else DEFAULT_CONTENT_TYPE,
        priority=min(_count(given.get(PRIORITY)), MAX_PRIORITY),
        handled_count=_count(given.get(HANDLED_COUNT)),
        origin=origin_of(_parsed(given.get(ORIGIN))),
    )
    return DecodedMessage(
        message=message,
        scheduled_at=_moment(given.get(SCHEDULED_AT), timestamp_ms),
        change=Change(change) if change in (Change.REQUEUED, Change.DEAD_LETTERED) else None,
        reason=_text(given.get(REASON)) or None,
    )


def decode_request(
    *, default_id: str, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int
) -> Message:
    """Return the message that a plain record in the inbox asks for, or refuse it."""
    given = _by_name(headers)
    channel = _text(given.get(CHANNEL))
    if not channel:
        raise InvalidMessageError(CHANNEL, "is missing", "name the topic to deliver to in this header")
    require_destination(channel)
    message = Message(
        id=require_message_id(_text(given.get(ID)) or default_id),
        channel=channel,
        payload=value or b"",
        deliver_at=_requested_time(given, from_ms(timestamp_ms)),
        key=_text(given[KEY]) if KEY in given else _text(key),
        headers=_users_headers(headers),
        content_type=_text(given.get(CONTENT_TYPE)) or DEFAULT_CONTENT_TYPE,
        priority=_count(given.get(PRIORITY)),
        handled_count=_count(given.get(HANDLED_COUNT)),
        origin=origin_of(_parsed(given.get(ORIGIN))),
    )
    check_message(message)
    return message


def _requested_time(given: Mapping[str, bytes], now: datetime) -> datetime:
    at, after = _text(given.get(DELIVER_AT)), _text(given.get(DELIVER_AFTER_MS))
    try:
        if after is not None and at is None:
            return from_ms(floor_ms(now) + int(after))
        if at is not None and after is None and at.strip().lstrip("-").isdigit():
            return from_ms(int(at))
    except (ValueError, OverflowError):
        raise InvalidMessageError(DELIVER_AT, f"{at or after!r} is not a time", "use milliseconds") from None
    if at is None or after is not None:
        raise InvalidMessageError(
            DELIVER_AT,
            "is missing" if after is None else f"{DELIVER_AFTER_MS} is given too",
            f"give either {DELIVER_AT} (milliseconds since 1970, or ISO-8601) or {DELIVER_AFTER_MS}",
        )
    return resolve_deliver_at(deliver_at=at, now=now)


def _by_name(headers: Headers | None) -> dict[str, bytes]:
    return {name: value for name, value in headers or () if value is not None}


def _users_headers(headers: Sequence[tuple[str, bytes]] | None) -> dict[str, str]:
    return {
        name.replace("\0", ""): _text(value) or "" for name, value in headers or () if not _is_reserved(name) and name
    }


def _is_reserved(name: str) -> bool:
    return name == CONTENT_TYPE or name.startswith("delay-")


def _text(value: bytes | None) -> str | None:
    """Return text; invalid bytes are escaped."""
    return None if value is None else value.decode(errors="backslashreplace").replace("\0", "")


def _count(value: bytes | None) -> int:
    """Return a number that fits into an envelope; 0 for anything else."""
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 0


def _moment(value: bytes | None, otherwise_ms: int) -> datetime:
    """Return a time given in milliseconds; for anything else, the time of the record."""
    try:
        return from_ms(int(value or b""))
    except (ValueError, OverflowError):
        return from_ms(max(otherwise_ms, 0))


def _parsed(value: bytes | None) -> Any:
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError):
        return None


def origin_parts(origin: Origin) -> list[Any]:
    return [origin.dag_id, origin.run_id, origin.task_id, origin.map_index]


def origin_of(parts: Iterable[Any] | None) -> Origin | None:
    try:
        dag_id, run_id, task_id, map_index = parts or ()
        return Origin(dag_id=str(dag_id), run_id=str(run_id), task_id=str(task_id), map_index=int(map_index))
    except (TypeError, ValueError, OverflowError):
        return None
