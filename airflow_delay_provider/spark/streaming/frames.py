"""Frames: what the stages of the dispatcher pass to each other and keep as state, packed into bytes.

A row of Spark carries many frames, because a row costs far more than a message. Frames are kept in checkpoints, so
their form is fixed; a new form needs a new kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from airflow_delay_provider.brokers.kafka.header_protocol import Headers

#: Kind, partition, offset, moment, then the lengths of topic, key, value and headers; -1 is None.
_HEAD = Struct(">BiqqHiiI")
_HEADER = Struct(">Hi")


class Kind(IntEnum):
    """What a frame is."""

    #: A message that begins to wait, and whose journal entry is still to be written.
    ACCEPTED = 1
    #: A message that was begun before; the journal contains it.
    HELD = 2
    #: A command that recalls a message.
    COMMAND = 3
    #: A record to write as it is.
    WRITE = 4
    #: A journal entry to write.
    ENTRY = 5
    #: A message to deliver.
    DELIVER = 6
    #: That the records of a partition before ``offset`` were read, and until when the last of them is held.
    SEEN = 7
    #: A time: all messages that were due before it are delivered in this micro-batch, or were before.
    CLOCK = 8


class Frame(NamedTuple):
    """One frame; for a message or command, ``topic``, ``partition`` and ``offset`` are the position of its record."""

    kind: Kind
    topic: str
    partition: int
    offset: int = -1
    #: Until when a message is held.
    moment_ms: int = 0
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = []  # noqa: RUF012 - never changed

    @property
    def order(self) -> tuple[int, str, int, int]:
        """Sorts messages by due time, and always in the same way."""
        return self.moment_ms, self.topic, self.partition, self.offset

    @property
    def position(self) -> tuple[str, int, int]:
        """The position of its record."""
        return self.topic, self.partition, self.offset


def pack(frames: Iterable[Frame]) -> bytes:
    """Return frames as bytes."""
    return b"".join(part for frame in frames for part in _parts(frame))


def _parts(frame: Frame) -> Iterator[bytes]:
    topic, headers = frame.topic.encode(), _pack_headers(frame.headers) if frame.headers else b""
    key, value = frame.key, frame.value
    yield _HEAD.pack(
        frame.kind,
        frame.partition,
        frame.offset,
        frame.moment_ms,
        len(topic),
        -1 if key is None else len(key),
        -1 if value is None else len(value),
        len(headers),
    )
    yield topic
    yield key or b""
    yield value or b""
    yield headers


def unpack(packed: bytes) -> Iterator[Frame]:
    """Undo :func:`pack`."""
    start, end = 0, len(packed)
    while start < end:
        kind, partition, offset, moment_ms, topic, key, value, headers = _HEAD.unpack_from(packed, start)
        start += _HEAD.size
        name = packed[start : (start := start + topic)].decode()
        own_key = None if key < 0 else packed[start : (start := start + key)]
        own_value = None if value < 0 else packed[start : (start := start + value)]
        own_headers = _unpack_headers(packed[start : start + headers]) if headers else []
        start += headers
        yield Frame(Kind(kind), name, partition, offset, moment_ms, own_key, own_value, own_headers)


def _pack_headers(headers: Headers) -> bytes:
    parts = []
    for name, value in headers:
        encoded = name.encode(errors="replace")
        # Another program may have written a header without a value.
        parts += [_HEADER.pack(len(encoded), -1 if value is None else len(value)), encoded, value or b""]
    return b"".join(parts)


def _unpack_headers(packed: bytes) -> Headers:
    headers: Headers = []
    start = 0
    while start < len(packed):
        name, value = _HEADER.unpack_from(packed, start)
        start += _HEADER.size
        text = packed[start : (start := start + name)].decode()
        headers.append((text, None if value < 0 else packed[start : (start := start + value)]))  # type: ignore[arg-type]
    return headers
