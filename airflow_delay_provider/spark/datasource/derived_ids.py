"""Ids of rows that have none: equal rows get equal ids, in any task, attempt, order of columns and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha1
from itertools import repeat
from typing import Any
from uuid import UUID

_NAMESPACE = UUID("3b1d8f0e-7c1e-4f54-9f0b-2f6f3c0a5d77")


def derive_ids(prefix: str, columns: Mapping[str, Sequence[Any] | None], *, rows: int) -> list[str]:
    """Return an id for each row: the UUID (version 5) of the prefix and of all values of the row that are not null.

    Times are in microseconds since the epoch and delays in microseconds, so the id of a row with a delay contains the
    delay and not the moment at which the row is written.
    """
    begin = sha1(_NAMESPACE.bytes + _field("", prefix.encode()), usedforsecurity=False)
    encoded = [_encode(name, values) for name, values in sorted(columns.items()) if values is not None]
    ids = []
    for values in zip(*encoded, strict=True) if encoded else repeat((), rows):
        digest = begin.copy()
        digest.update(b"".join(values))
        text = digest.hexdigest()
        ids.append(f"{text[:8]}-{text[8:12]}-5{text[13:16]}-{_VARIANT[text[16]]}{text[17:20]}-{text[20:32]}")
    return ids


#: The fourth hexadecimal group of a UUID begins with 8, 9, a or b.
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def _encode(name: str, values: Sequence[Any]) -> list[bytes]:
    """Return each value with its name and length, so that no two rows look alike; nothing for null."""
    first = next((value for value in values if value is not None), None)
    begin = name.encode() + b"="
    match first:
        case bytes():
            return [b"" if value is None else b"%b%d:%b" % (begin, len(value), value) for value in values]
        case str():
            return [b"" if value is None else _field(name, value.encode(errors="surrogatepass")) for value in values]
        case int():
            return [b"" if value is None else b"%b%d;" % (begin, value) for value in values]
        case dict():
            return [b"" if not value else _field(name, _encode_headers(value)) for value in values]
    return [b""] * len(values)


def _field(name: str, value: bytes) -> bytes:
    return b"%b=%d:%b" % (name.encode(), len(value), value)


def _encode_headers(headers: Mapping[str, str | None]) -> bytes:
    return b"".join(
        _field(name, b"" if value is None else value.encode(errors="surrogatepass"))
        for name, value in sorted(headers.items())
    )
