"""Envelopes: the form of messages in the ladder.

The key of the record holds the time until which the message is held and its id. The value holds everything else, and
nothing reads it on the way.
"""

from __future__ import annotations

import json
from struct import Struct
from struct import error as StructError  # noqa: N812 - a class
from typing import TYPE_CHECKING, Any
from zlib import crc32

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka.header_protocol import DecodedMessage, Headers, decode_request
from airflow_delay_provider.domain.clock import ceil_ms, from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import MAX_CONTENT_TYPE_LENGTH, Message, require_message_id

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
    from airflow_delay_provider.brokers.kafka.recall import RecordPosition

_ENVELOPE_VERSION = 1
_HELD_UNTIL = Struct(">Q")
#: Version, change, priority, handled count, due, scheduled, then the lengths of channel, content type, key and more.
_HEAD = Struct(">BBBIqqHHiI")
_CHANGES = {0: None, 1: Change.REQUEUED, 2: Change.DEAD_LETTERED}
_CHANGE_CODES = {change: code for code, change in _CHANGES.items()}


class Envelope:
    """The parts of an envelope, as bytes; decoded when its message is due."""

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
        """Refuse what consumers of the channel or of the journal could not read; any program may have written it."""
        protocol.require_destination(self.channel)
        require_message_id(self.message_id.decode())
        if not 1 <= len(self.content_type) <= 4 * MAX_CONTENT_TYPE_LENGTH:
            raise InvalidMessageError("content_type", "is not a content type", "use one such as application/json")
        self.content_type.decode()
        if self.key is not None:
            self.key.decode()
        for name, moment_ms in (("deliver_at", self.deliver_at_ms), ("scheduled_at", self.scheduled_at_ms)):
            if not protocol.MIN_MS <= moment_ms <= protocol.MAX_MS:
                raise InvalidMessageError(name, f"{moment_ms} is out of range", "use milliseconds since 1970")

    def record_headers(self) -> Headers:
        """Return the headers of the message in its channel."""
        if self.headers is None:
            self.headers = self._record_headers()
        return self.headers

    def _record_headers(self) -> Headers:
        headers: Headers = [
            (protocol.ID, self.message_id),
            (protocol.CONTENT_TYPE, self.content_type),
            (protocol.DELIVER_AT, b"%d" % self.deliver_at_ms),
            (protocol.SCHEDULED_AT, b"%d" % self.scheduled_at_ms),
        ]
        if self.handled_count:
            headers.append((protocol.HANDLED_COUNT, b"%d" % self.handled_count))
        if self.priority:
            headers.append((protocol.PRIORITY, b"%d" % self.priority))
        if self.more:
            if "origin" in self.more:
                headers.append((protocol.ORIGIN, json.dumps(self.more["origin"]).encode()))
            headers += [(name, value.encode()) for name, value in self.more.get("headers", {}).items()]
        return headers

    def decode(self) -> DecodedMessage:
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
            origin=protocol.origin_of(self.more.get("origin")),
        )
        return DecodedMessage(
            message=message,
            scheduled_at=from_ms(self.scheduled_at_ms),
            change=self.change,
            reason=self.more.get("reason"),
        )


def _checked_more(more: Any) -> dict[str, Any]:
    """Refuse headers and reasons that this package would not write."""
    headers = more.get("headers", {}) if isinstance(more, dict) else None
    if not isinstance(headers, dict) or not isinstance(more.get("reason", ""), str):
        raise InvalidMessageError("headers", "are not headers", "use a dict of str to str")
    for name, value in headers.items():
        if not isinstance(value, str) or not name or "\0" in name:
            raise InvalidMessageError("headers", f"{name[:100]!r} is not a header", "use str without NUL for both")
        # Raises for a lone surrogate, which JSON allows.
        (name + value).encode()
    checked: dict[str, Any] = more
    return checked


def encode_key(held_until_ms: int, message_id: str) -> bytes:
    """Return the key of an envelope."""
    return _HELD_UNTIL.pack(max(0, held_until_ms)) + message_id.encode()


def message_id_of(key: bytes) -> str:
    """Return the id of an envelope."""
    return key[8:].decode()


def channel_of(value: bytes) -> str | None:
    """Return the channel of an envelope; None if it cannot be a topic."""
    try:
        length = _HEAD.unpack_from(value)[6]
        channel = value[_HEAD.size : _HEAD.size + length].decode()
    except (StructError, UnicodeDecodeError):
        return None
    return channel if protocol.CHANNEL_FORM.fullmatch(channel) else None


def order_of(envelope: Envelope) -> int:
    """Return a number that messages of one channel and key share."""
    key = envelope.message_id if envelope.key is None else envelope.key
    return crc32(key, crc32(envelope.channel.encode()))


def held_until_ms(key: bytes) -> int:
    """Return the time until which an envelope is held."""
    return int.from_bytes(key[:8], "big")


def encode_envelope(message: Message, *, now_ms: int, change: Change | None = None, reason: str | None = None) -> bytes:
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


def encode_request(
    *, default_id: str, key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int
) -> tuple[bytes, bytes]:
    """Return key and value of the envelope that a plain record in the inbox asks for."""
    message = decode_request(default_id=default_id, key=key, value=value, headers=headers, timestamp_ms=timestamp_ms)
    return encode_key(ceil_ms(message.deliver_at), message.id), encode_envelope(message, now_ms=timestamp_ms)


def with_deliver_at(value: bytes, deliver_at_ms: int) -> bytes:
    """Return an envelope with another due time."""
    head = list(_HEAD.unpack_from(value))
    head[1], head[4] = 0, deliver_at_ms
    return _HEAD.pack(*head) + value[_HEAD.size :]


def _more(message: Message, reason: str | None) -> bytes:
    more: dict[str, Any] = {}
    if message.headers:
        more["headers"] = dict(message.headers)
    if message.origin is not None:
        more["origin"] = protocol.origin_parts(message.origin)
    if reason is not None:
        more["reason"] = protocol.clean_reason(reason)
    return json.dumps(more).encode()


def encode_headers(
    message: Message, *, now_ms: int, topic: str, change: Change | None = None, reason: str | None = None
) -> Headers:
    """Return the headers of a message that is written to ``topic`` now."""
    envelope = Envelope(encode_key(0, message.id), encode_envelope(message, now_ms=now_ms))
    headers = [*envelope.record_headers()]
    if topic != message.channel:
        headers.append((protocol.CHANNEL, message.channel.encode()))
    if change is not None:
        headers += [
            (protocol.CHANGE, change.value.encode()),
            (protocol.REASON, protocol.clean_reason(reason or "").encode()),
        ]
    return headers


#: Larger records are cut: the dead-letter topic accepts no more than any topic of the ladder.
MOST_BYTES = 15_000_000
#: What remains of each part of a record that is cut.
CUT_BYTES = 100_000
CUT_KEY_BYTES = 1_000
DeadLetter = tuple[bytes | None, bytes | None, Headers]


def dead_letter_of(
    position: RecordPosition, record: Record, reason: str, *, most_bytes: int = MOST_BYTES
) -> DeadLetter:
    """Return key, value and headers of a dead letter, which contains all that a replay needs.

    A message is written as in its channel, with a header that names the channel. Any other record is written as it is.
    A record that is too large is cut, and a header says so.
    """
    why: Headers = [
        (protocol.CHANGE, Change.DEAD_LETTERED.value.encode()),
        (protocol.REASON, protocol.clean_reason(reason).encode()),
        (protocol.SOURCE, f"{position.topic}/{position.partition}/{position.offset}".encode()),
    ]
    try:
        envelope = Envelope(record.key or b"", record.value or b"")
        headers = [*envelope.record_headers(), (protocol.CHANNEL, envelope.channel.encode()), *why]
        key, value = envelope.key, envelope.payload
    except Exception:  # noqa: BLE001 - it may be anything
        key, value, headers = record.key, record.value or b"", [*_foreign_headers(record), *why]
    size = len(key or b"") + len(value) + sum(_size_of_header(*each) for each in headers)
    if size <= most_bytes:
        return key, value if value or record.value is not None else None, headers
    kept = [each for each in headers if each not in why and _size_of_header(*each) <= CUT_KEY_BYTES]
    cut = (protocol.TRUNCATED, b"%d" % size)
    return _cut_key(key), value[: min(CUT_BYTES, most_bytes)], [*kept[:100], *why, cut]


def _size_of_header(name: str, value: bytes | None) -> int:
    return len(name.encode(errors="replace")) + len(value or b"") + protocol.HEADER_BYTES


def _foreign_headers(record: Record) -> Headers:
    """Return the headers of another program, except those that this package adds to dead letters."""
    ours = {protocol.CHANGE, protocol.REASON, protocol.SOURCE, protocol.TRUNCATED}
    return [(name, value) for name, value in record.headers or [] if name not in ours]


def _cut_key(key: bytes | None) -> bytes | None:
    return None if key is None else key[:CUT_KEY_BYTES]
