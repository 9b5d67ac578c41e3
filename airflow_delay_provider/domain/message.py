"""The message: what the user wants delivered, where and when."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any
from uuid import UUID, uuid4, uuid5

from airflow_delay_provider.domain.clock import ceil_ms, from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError, PayloadError

MAX_ID_LENGTH = 255
MAX_CONTENT_TYPE_LENGTH = 255
#: A queue, a topic, ``exchange:routing.key``, or an embedded channel.
CHANNEL_FORM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,254}")
_ID_NAMESPACE = UUID("6f2c7a52-52a5-4cc2-8b0a-6f6d6e1d9d4c")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The task instance that scheduled a message."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    def message_id(self, position: int | str) -> str:
        """Return the id of this task's message at ``position``; a retried task gets the same again."""
        parts = (self.dag_id, self.run_id, self.task_id, self.map_index, position)
        return str(uuid5(_ID_NAMESPACE, json.dumps(parts)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message. It cannot be constructed with values that no broker could deliver."""

    channel: str
    payload: bytes
    #: Aware; kept in UTC at millisecond resolution, rounded up.
    deliver_at: datetime
    id: str = field(default_factory=lambda: str(uuid4()))
    #: Messages of one channel and key that are due in order are delivered in order.
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"
    priority: int = 0
    #: How often a consumer has put it back.
    handled_count: int = 0
    origin: Origin | None = None

    def __post_init__(self) -> None:
        require_channel(self.channel)
        require_message_id(self.id)
        if not isinstance(self.payload, bytes):
            raise PayloadError("payload", f"{type(self.payload).__name__} is not bytes", "encode it as bytes")
        if self.key is not None and not _is_text(self.key):
            raise InvalidMessageError("key", f"{self.key!r} is not text", "use str without NUL, or None")
        if not isinstance(self.headers, Mapping):
            raise InvalidMessageError("headers", f"{self.headers!r} is not a mapping", "use a dict of str to str")
        for name, value in self.headers.items():
            if not _is_text(name) or not _is_text(value):
                raise InvalidMessageError("headers", f"{name!r}: {value!r} is not text", "use str without NUL for both")
        if not _is_text(self.content_type) or not 1 <= len(self.content_type) <= MAX_CONTENT_TYPE_LENGTH:
            raise InvalidMessageError(
                "content_type", f"{self.content_type!r} is not a content type", "use one such as application/json"
            )
        object.__setattr__(self, "deliver_at", _round_up(require_aware("deliver_at", self.deliver_at)))

    def requeued(self, deliver_at: datetime) -> Message:
        """Return this message for another delivery to its own channel."""
        return replace(self, deliver_at=deliver_at, handled_count=self.handled_count + 1)

    def replayed(self, deliver_at: datetime) -> Message:
        """Return this dead letter for a new start."""
        return replace(self, deliver_at=deliver_at, handled_count=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp:
    """Why a message is in a dead-letter channel."""

    reason: str | None
    at: datetime | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A message that a consumer has received; invisible to others until it is settled or its visibility ends."""

    message: Message
    #: The adapter's handle for settling it.
    handle: str
    #: Only for dead letters, where the broker records it.
    given_up: GivenUp | None = field(default=None, compare=False)


def require_channel(channel: str) -> str:
    """Return the channel, or refuse an invalid name."""
    if not isinstance(channel, str) or not _has_channel_form(channel):
        raise InvalidMessageError(
            "channel",
            f"{channel!r} is not a valid channel name",
            "use 1-255 letters, digits and . _ - : / starting with a letter, digit or _",
        )
    return channel


@lru_cache(maxsize=1000)
def _has_channel_form(channel: str) -> bool:
    return CHANNEL_FORM.fullmatch(channel) is not None


def require_message_id(message_id: str) -> str:
    """Return the id, or refuse an invalid one."""
    if not isinstance(message_id, str) or not 1 <= len(message_id) <= MAX_ID_LENGTH or not message_id.isprintable():
        raise InvalidMessageError(
            "message_id", f"{message_id!r} is not a valid id", f"use 1-{MAX_ID_LENGTH} printable characters"
        )
    return message_id


def require_aware(name: str, moment: datetime) -> datetime:
    """Return ``moment`` in UTC; refuse a naive datetime."""
    if moment.tzinfo is UTC:
        return moment
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise InvalidMessageError(
            name,
            f"{moment.isoformat()} has no time zone",
            "add one, for example +00:00 or datetime(..., tzinfo=UTC)",
        )
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise _beyond_calendar(name, moment) from None


def encode_payload(value: Any) -> tuple[bytes, str]:
    """Return a value as bytes, with its content type: bytes and text unchanged, anything else as JSON."""
    if isinstance(value, bytes):
        return value, "application/octet-stream"
    try:
        if isinstance(value, str):
            return value.encode(), "text/plain; charset=utf-8"
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), "application/json"
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(
            "payload",
            f"{type(value).__name__} cannot be written as {'UTF-8' if isinstance(value, str) else 'JSON'} ({error})",
            "pass bytes, str or plain JSON data",
        ) from None


def decode_payload(payload: bytes, content_type: str) -> Any:
    """Undo :func:`encode_payload`; bytes that are not what the content type says stay bytes."""
    try:
        if content_type.startswith("application/json"):
            return json.loads(payload)
        if content_type.startswith("text/"):
            return payload.decode()
    except ValueError:
        return payload
    return payload


def _is_text(value: object) -> bool:
    """Whether every broker and database can store it: UTF-8 without NUL, which PostgreSQL refuses."""
    if not isinstance(value, str) or "\0" in value:
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _round_up(moment: datetime) -> datetime:
    if moment.microsecond % 1000 == 0:
        return moment
    try:
        return from_ms(ceil_ms(moment))
    except OverflowError:
        raise _beyond_calendar("deliver_at", moment) from None


def _beyond_calendar(name: str, moment: datetime) -> InvalidMessageError:
    return InvalidMessageError(name, f"{moment.isoformat()} is out of range", "use a year from 1 to 9999")
