"""How a message is written as Kafka records and read back.

In the ladder a message is an *envelope*: the key of the record is the moment until which it is held and its id, the
value is everything else, which nobody looks into on the way. In a channel it is a plain record: key and payload as the
user gave them, the rest in headers. The same headers, written by anybody, schedule a message through the inbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class
from typing import Any

from airflow_delay_provider.brokers.kafka.topology import VERSION
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms, from_ms
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import (
    MAX_CONTENT_TYPE_LENGTH,
    Message,
    Origin,
    require_message_id,
)
from airflow_delay_provider.domain.schedule import MAX_PRIORITY, resolve_deliver_at
from airflow_delay_provider.exceptions import InvalidMessageError

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
#: What a record means where it is not a schedule: a requeue or a dead letter.
CHANGE = "delay-change"
REASON = "delay-reason"
#: Of a dead letter: the record that it was made of, as topic, partition and offset, and whether something is left out.
SOURCE = "delay-source"
TRUNCATED = "delay-truncated"

Headers = list[tuple[str, bytes]]
#: What a topic may be called that is a channel.
CHANNEL_FORM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,248}")
MAX_REASON_LENGTH = 2000
MAX_HEADERS_BYTES = 100_000
#: The last millisecond of the calendar, and the first one.
MAX_MS = floor_ms(datetime.max.replace(tzinfo=UTC))
MIN_MS = ceil_ms(datetime.min.replace(tzinfo=UTC))
DEFAULT_CONTENT_TYPE = "application/octet-stream"

_ENVELOPE_VERSION = 1
_HELD_UNTIL = Struct(">Q")
#: Version, change, priority, handled count, due, scheduled, then the lengths of channel, content type, key and more.
_HEAD = Struct(">BBBIqqHHiI")
_CHANGES = {0: None, 1: Change.REQUEUED, 2: Change.DEAD_LETTERED}
_CHANGE_CODES = {change: code for code, change in _CHANGES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wired:
    """A message that was read from a record."""

    message: Message
    scheduled_at: datetime
    change: Change | None
    reason: str | None


class Envelope:
    """The parts of an envelope, as bytes; read when a message is about to be delivered."""

    __slots__ = (
        "change",
        "channel",
        "content_type",
        "deliver_at_ms",
        "handled_count",
        "headers",
        "key",
        "message_id",
        "more",
        "payload",
        "priority",
        "scheduled_at_ms",
    )

    def __init__(self, key: bytes, value: bytes) -> None:
        version, change, self.priority, self.handled_count, self.deliver_at_ms, self.scheduled_at_ms, *lengths = (
            _HEAD.unpack_from(value)
        )
        if version != _ENVELOPE_VERSION:
            raise InvalidMessageError("envelope", f"version {version} is unknown", "upgrade the dispatcher")
        self.change = _CHANGES.get(change)
        self.message_id = key[8:]
        channel, content_type, key_length, more = lengths
        start = _HEAD.size
        self.channel = value[start : (start := start + channel)].decode()
        self.content_type = value[start : (start := start + content_type)]
        self.key = None if key_length < 0 else value[start : (start := start + key_length)]
        if start + more > len(value):
            raise InvalidMessageError("envelope", "ends too soon", "write it as this package does")
        self.more: dict[str, Any] = _checked_more(json.loads(value[start : start + more])) if more else {}
        self.payload = value[start + more :]
        self.headers: Headers | None = None

    def check(self) -> None:
        """Refuse what readers of the channel or of the journal could not read; anybody may have written it."""
        require_destination(self.channel)
        require_message_id(self.message_id.decode())
        if not 1 <= len(self.content_type) <= 4 * MAX_CONTENT_TYPE_LENGTH:
            raise InvalidMessageError("content_type", "is no content type", "use one such as application/json")
        self.content_type.decode()
        if self.key is not None:
            self.key.decode()
        for name, moment_ms in (("deliver_at", self.deliver_at_ms), ("scheduled_at", self.scheduled_at_ms)):
            if not MIN_MS <= moment_ms <= MAX_MS:
                raise InvalidMessageError(name, f"{moment_ms} is in no calendar", "use milliseconds since 1970")

    def record_headers(self) -> Headers:
        """Return the headers with which the message lies in its channel."""
        if self.headers is None:
            self.headers = self._record_headers()
        return self.headers

    def _record_headers(self) -> Headers:
        headers: Headers = [
            (ID, self.message_id),
            (CONTENT_TYPE, self.content_type),
            (DELIVER_AT, b"%d" % self.deliver_at_ms),
            (SCHEDULED_AT, b"%d" % self.scheduled_at_ms),
        ]
        if self.handled_count:
            headers.append((HANDLED_COUNT, b"%d" % self.handled_count))
        if self.priority:
            headers.append((PRIORITY, b"%d" % self.priority))
        if self.more:
            if "origin" in self.more:
                headers.append((ORIGIN, json.dumps(self.more["origin"]).encode()))
            headers += [(name, value.encode()) for name, value in self.more.get("headers", {}).items()]
        return headers

    def read(self) -> Wired:
        """Return the message."""
        message = Message(
            id=self.message_id.decode(),
            channel=self.channel,
            payload=self.payload,
            deliver_at=from_ms(self.deliver_at_ms),
            key=None if self.key is None else self.key.decode(),
            headers=self.more.get("headers", {}),
            content_type=self.content_type.decode(),
            priority=self.priority,
            handled_count=self.handled_count,
            origin=_origin(self.more.get("origin")),
        )
        return Wired(
            message=message,
            scheduled_at=from_ms(self.scheduled_at_ms),
            change=self.change,
            reason=self.more.get("reason"),
        )


def _checked_more(more: Any) -> dict[str, Any]:
    """Refuse what this package would not have written."""
    headers = more.get("headers", {}) if isinstance(more, dict) else None
    if not isinstance(headers, dict) or not isinstance(more.get("reason", ""), str):
        raise InvalidMessageError("headers", "are no headers", "use a dict of str to str")
    for name, value in headers.items():
        if not isinstance(value, str) or not name or "\0" in name:
            raise InvalidMessageError("headers", f"{name[:100]!r} is no header", "use str without NUL for both")
        # Half of a pair of surrogates is text in JSON, and nowhere else.
        (name + value).encode()
    checked: dict[str, Any] = more
    return checked


def check_message(message: Message) -> None:
    """Refuse what a Kafka record cannot carry."""
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
    """Refuse what cannot be the name of a topic."""
    if not CHANNEL_FORM.fullmatch(channel):
        raise InvalidMessageError(
            "channel",
            f"{channel[:250]!r} cannot be a Kafka topic",
            "use 1-249 letters, digits and . _ - starting with a letter, digit or _",
        )


@lru_cache(maxsize=1000)
def require_destination(channel: str) -> None:
    """Refuse what messages may not be delivered to: Kafka's own topics, and those of any ladder."""
    check_channel(channel)
    if channel.startswith("__"):
        raise InvalidMessageError("channel", f"{channel!r} is one of Kafka's own topics", "use another topic")
    if channel == VERSION or channel.startswith(f"{VERSION}."):
        raise InvalidMessageError("channel", f"{channel!r} belongs to a ladder", "use another topic")


# -- in the ladder -----------------------------------------------------------------------------------------------


def write_key(held_until_ms: int, message_id: str) -> bytes:
    """Return the key of an envelope."""
    return _HELD_UNTIL.pack(max(0, held_until_ms)) + message_id.encode()


def message_id_of(key: bytes) -> str:
    """Return the id of an envelope."""
    return key[8:].decode()


def channel_of(value: bytes) -> str | None:
    """Return the channel of an envelope; None where there is none that could be a topic."""
    try:
        length = _HEAD.unpack_from(value)[6]
        channel = value[_HEAD.size : _HEAD.size + length].decode()
    except (StructError, UnicodeDecodeError):
        return None
    return channel if CHANNEL_FORM.fullmatch(channel) else None


def held_until_ms(key: bytes) -> int:
    """Return the moment until which an envelope is held."""
    return int.from_bytes(key[:8], "big")


def write_envelope(message: Message, *, now_ms: int, change: Change | None = None, reason: str | None = None) -> bytes:
    """Return the value of an envelope."""
    channel, content_type = message.channel.encode(), message.content_type.encode()
    key = b"" if message.key is None else message.key.encode()
    more = b"" if not message.headers and message.origin is None and reason is None else _more(message, reason)
    head = _HEAD.pack(
        _ENVELOPE_VERSION,
        _CHANGE_CODES[change],
        message.priority,
        message.handled_count,
        ceil_ms(message.deliver_at),
        now_ms,
        len(channel),
        len(content_type),
        -1 if message.key is None else len(key),
        len(more),
    )
    return b"".join((head, channel, content_type, key, more, message.payload))


def moved_envelope(value: bytes, deliver_at_ms: int) -> bytes:
    """Return an envelope with another due time."""
    head = list(_HEAD.unpack_from(value))
    head[1], head[4] = 0, deliver_at_ms
    return _HEAD.pack(*head) + value[_HEAD.size :]


def _more(message: Message, reason: str | None) -> bytes:
    more: dict[str, Any] = {}
    if message.headers:
        more["headers"] = dict(message.headers)
    if message.origin is not None:
        more["origin"] = _origin_parts(message.origin)
    if reason is not None:
        more["reason"] = clean_reason(reason)
    return json.dumps(more).encode()


def clean_reason(reason: str) -> str:
    """Return any text as one that can be stored everywhere."""
    return reason[:MAX_REASON_LENGTH].encode(errors="replace").decode().replace("\0", "")


# -- in a channel ------------------------------------------------------------------------------------------------


def write_headers(
    message: Message, *, now_ms: int, topic: str, change: Change | None = None, reason: str | None = None
) -> Headers:
    """Return the headers of a message that is put into ``topic`` now."""
    headers = [*Envelope(write_key(0, message.id), write_envelope(message, now_ms=now_ms)).record_headers()]
    if topic != message.channel:
        headers.append((CHANNEL, message.channel.encode()))
    if change is not None:
        headers += [(CHANGE, change.value.encode()), (REASON, clean_reason(reason or "").encode())]
    return headers


def read_message(
    *, topic: str, position: str, key: bytes | None, value: bytes | None, headers: Headers | None, timestamp_ms: int
) -> Wired:
    """Return a message of a channel; what others wrote there is read as far as it says anything."""
    given = _by_name(headers)
    channel = _text(given.get(CHANNEL))
    message_id = _text(given.get(ID)) or ""
    content_type = _text(given.get(CONTENT_TYPE)) or ""
    change = _text(given.get(CHANGE))
    message = Message(
        id=message_id if 1 <= len(message_id) <= 255 and message_id.isprintable() else position,
        channel=channel if channel and CHANNEL_FORM.fullmatch(channel) else topic,
        payload=value or b"",
        deliver_at=_moment(given.get(DELIVER_AT), timestamp_ms),
        key=_text(key),
        headers=_users_headers(headers),
        content_type=content_type if 1 <= len(content_type) <= MAX_CONTENT_TYPE_LENGTH else DEFAULT_CONTENT_TYPE,
        priority=min(_count(given.get(PRIORITY)), MAX_PRIORITY),
        handled_count=_count(given.get(HANDLED_COUNT)),
        origin=_origin(_parsed(given.get(ORIGIN))),
    )
    return Wired(
        message=message,
        scheduled_at=_moment(given.get(SCHEDULED_AT), timestamp_ms),
        change=Change(change) if change in (Change.REQUEUED, Change.DEAD_LETTERED) else None,
        reason=_text(given.get(REASON)) or None,
    )


# -- in the inbox, by anybody ------------------------------------------------------------------------------------


def read_request(
    *, position: str, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int
) -> Message:
    """Return the message that a plain record in the inbox asks for, or refuse it with a sentence."""
    given = _by_name(headers)
    channel = _text(given.get(CHANNEL))
    if not channel:
        raise InvalidMessageError(CHANNEL, "is missing", "name the topic to deliver to in this header")
    require_destination(channel)
    message = Message(
        id=require_message_id(_text(given.get(ID)) or position),
        channel=channel,
        payload=value or b"",
        deliver_at=_requested_time(given, from_ms(timestamp_ms)),
        key=_text(given[KEY]) if KEY in given else _text(key),
        headers=_users_headers(headers),
        content_type=_text(given.get(CONTENT_TYPE)) or DEFAULT_CONTENT_TYPE,
        priority=_count(given.get(PRIORITY)),
        handled_count=_count(given.get(HANDLED_COUNT)),
        origin=_origin(_parsed(given.get(ORIGIN))),
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


# -- pieces ------------------------------------------------------------------------------------------------------


def _by_name(headers: Headers | None) -> dict[str, bytes]:
    return {name: value for name, value in headers or () if value is not None}


def _users_headers(headers: Sequence[tuple[str, bytes]] | None) -> dict[str, str]:
    return {
        name.replace("\0", ""): _text(value) or "" for name, value in headers or () if not _is_reserved(name) and name
    }


def _is_reserved(name: str) -> bool:
    return name == CONTENT_TYPE or name.startswith("delay-")


def _text(value: bytes | None) -> str | None:
    """Return text; bytes that are none are shown as they are."""
    return None if value is None else value.decode(errors="backslashreplace").replace("\0", "")


def _count(value: bytes | None) -> int:
    """Return a number that an envelope has room for; 0 for anything else."""
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 0


def _moment(value: bytes | None, otherwise_ms: int) -> datetime:
    """Return a time given in milliseconds; for anything else, when the record was written."""
    try:
        return from_ms(int(value or b""))
    except (ValueError, OverflowError):
        return from_ms(max(otherwise_ms, 0))


def _parsed(value: bytes | None) -> Any:
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError):
        return None


def _origin_parts(origin: Origin) -> list[Any]:
    return [origin.dag_id, origin.run_id, origin.task_id, origin.map_index]


def _origin(parts: Iterable[Any] | None) -> Origin | None:
    try:
        dag_id, run_id, task_id, map_index = parts or ()
        return Origin(dag_id=str(dag_id), run_id=str(run_id), task_id=str(task_id), map_index=int(map_index))
    except (TypeError, ValueError, OverflowError):
        return None
