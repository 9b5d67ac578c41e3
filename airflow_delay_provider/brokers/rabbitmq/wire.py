"""Encoding a message as an AMQP message, and decoding it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from pika import BasicProperties

from airflow_delay_provider.domain.arguments import MAX_PRIORITY
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import CHANNEL_FORM, MAX_ID_LENGTH, Message, Origin

DELIVER_AT = "delay-deliver-at"
SCHEDULED_AT = "delay-scheduled-at"
HANDLED_COUNT = "delay-handled-count"
CHANNEL = "delay-channel"
KEY = "delay-key"
ORIGIN = "delay-origin"
#: Set when a publish is not a schedule but a requeue or a dead letter.
CHANGE = "delay-change"
REASON = "delay-reason"

#: Headers that the broker or one of its plugins writes or obeys, in any version. ``x-death`` must never enter the
#: ladder again: the broker takes a message that returns to a queue by expiry alone for a cycle and drops it silently.
_BROKERS_OWN = {
    "x-death",
    "x-delivery-count",
    "x-acquired-count",
    "x-stream-offset",
    "x-received-from",
    "x-shovelled",
    "CC",
    "BCC",
}
_RESERVED_BEGINNINGS = ("delay-", "x-first-death-", "x-last-death-", "x-opt-", "x-shovelled-")
MAX_REASON_LENGTH = 2000
#: AMQP writes all properties into one frame of 128 KiB.
MAX_PROPERTIES_BYTES = 100_000
_PERSISTENT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedMessage:
    """A message as it was published: with the time, and why if it was a requeue or a dead letter."""

    message: Message
    scheduled_at: datetime | None
    change: Change | None
    reason: str | None


def check_message(message: Message) -> None:
    """Refuse a message that AMQP cannot carry."""
    if len(message.id.encode()) > MAX_ID_LENGTH:
        raise InvalidMessageError("message_id", f"{message.id!r} is more than 255 bytes long", "use a shorter id")
    if len(message.content_type.encode()) > MAX_ID_LENGTH:
        raise InvalidMessageError("content_type", "is more than 255 bytes long", "use a shorter one")
    if not 0 <= message.priority <= MAX_PRIORITY:
        raise InvalidMessageError("priority", f"{message.priority} is not an AMQP priority", f"use 0 to {MAX_PRIORITY}")
    size = len((message.key or "").encode())
    for name, value in message.headers.items():
        if _is_reserved(name):
            raise InvalidMessageError("headers", f"{name!r} is reserved", "use another name")
        if len(name.encode()) > MAX_ID_LENGTH:
            raise InvalidMessageError("headers", f"{name[:40]!r}... is more than 255 bytes long", "use a shorter name")
        size += len(name.encode()) + len(value.encode()) + 8
    if size > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(
            "headers", f"{size} bytes of headers and key are too many for AMQP", "put the data into the payload"
        )


def encode_properties(
    message: Message, *, now: datetime, change: Change | None = None, reason: str | None = None
) -> BasicProperties:
    """Return the AMQP properties of a message that is published now; its payload is the body."""
    headers: dict[str, Any] = {
        **message.headers,
        DELIVER_AT: ceil_ms(message.deliver_at),
        SCHEDULED_AT: floor_ms(now),
        CHANNEL: message.channel,
    }
    # Absent values are left out: the client library spends most of its time on writing properties.
    if message.handled_count:
        headers[HANDLED_COUNT] = message.handled_count
    if message.key is not None:
        headers[KEY] = message.key
    if message.origin is not None:
        origin = message.origin
        headers[ORIGIN] = json.dumps([origin.dag_id, origin.run_id, origin.task_id, origin.map_index])
    if change is not None:
        headers[CHANGE] = change.value
        headers[REASON] = (reason or "")[:MAX_REASON_LENGTH].encode(errors="replace").decode()
    return BasicProperties(
        message_id=message.id,
        content_type=message.content_type,
        priority=message.priority or None,
        delivery_mode=_PERSISTENT,
        headers=headers,
    )


def decode_message(properties: BasicProperties, body: bytes, *, queue: str, now: datetime) -> DecodedMessage:
    """Return the message; messages of other programs are decoded as far as possible."""
    headers: Mapping[str, Any] = {_decoded(name): value for name, value in (properties.headers or {}).items()}
    deliver_at = _moment(headers.get(DELIVER_AT))
    channel = headers.get(CHANNEL)
    is_ours = channel is not None
    message_id = _decoded(properties.message_id or "")
    message = Message(
        id=message_id if message_id and message_id.isprintable() else str(uuid4()),
        channel=channel if isinstance(channel, str) and CHANNEL_FORM.fullmatch(channel) else queue,
        payload=body,
        deliver_at=deliver_at or from_ms(floor_ms(now)),
        key=_text(headers.get(KEY)),
        headers={
            _without_nul(name): _without_nul(str(value))
            for name, value in headers.items()
            if not _is_reserved(name) and not (is_ours and _is_annotation(name, value))
        },
        content_type=_without_nul(_decoded(properties.content_type or "")) or "application/octet-stream",
        priority=properties.priority or 0,
        handled_count=_count(headers.get(HANDLED_COUNT)),
        origin=_origin(headers.get(ORIGIN)),
    )
    change = headers.get(CHANGE)
    return DecodedMessage(
        message=message,
        scheduled_at=_moment(headers.get(SCHEDULED_AT)),
        change=Change(change) if change in (Change.REQUEUED, Change.DEAD_LETTERED) else None,
        reason=_text(headers.get(REASON)) or None,
    )


def _moment(value: Any) -> datetime | None:
    try:
        return from_ms(int(value))
    except (TypeError, ValueError, OverflowError):
        return None


def _text(value: Any) -> str | None:
    return _without_nul(value) if isinstance(value, str) else None


def _decoded(text: str | bytes) -> str:
    """Return text; the client library does not decode bytes that are not UTF-8."""
    return text.decode(errors="backslashreplace") if isinstance(text, bytes) else text


def _without_nul(text: str) -> str:
    return text.replace("\0", "")


def _is_reserved(header: str) -> bool:
    return header in _BROKERS_OWN or header.startswith(_RESERVED_BEGINNINGS)


def _is_annotation(header: str, value: Any) -> bool:
    """Whether the broker has added a header to one of our messages: headers of users are text.

    From 4.0 on the broker adds headers that begin with ``x-``, counts for example.
    """
    return header.startswith("x-") and not isinstance(value, str | bytes)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _origin(value: Any) -> Origin | None:
    try:
        dag_id, run_id, task_id, map_index = json.loads(value)
        return Origin(dag_id=str(dag_id), run_id=str(run_id), task_id=str(task_id), map_index=int(map_index))
    except (TypeError, ValueError):
        return None
