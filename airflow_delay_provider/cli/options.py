"""What is typed on the command line, checked before anything is opened."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow_delay_provider.exceptions import InvalidMessageError, PayloadError


def parse_headers(pairs: Sequence[str] | None) -> dict[str, str]:
    """Return the headers of ``NAME=VALUE`` pairs."""
    headers: dict[str, str] = {}
    for pair in pairs or ():
        name, sign, value = pair.partition("=")
        if not name or not sign:
            raise InvalidMessageError("headers", f"{pair!r} is not a header", "use NAME=VALUE")
        if name in headers:
            raise InvalidMessageError("headers", f"{name!r} is given twice", "give each name once")
        headers[name] = value
    return headers


def parse_count(name: str, text: str) -> int:
    """Return a whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise InvalidMessageError(name, f"{text!r} is not a whole number from 1", "use for example 100")
    return number


def parse_number(name: str, text: str, *, from_zero: bool = False) -> float:
    """Return a number above 0, or from 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (number == 0 and not from_zero):
        least = "from 0" if from_zero else "above 0"
        raise InvalidMessageError(name, f"{text!r} is not a number {least}", "use for example 0.5 or 500")
    return number


def parse_seconds(name: str, text: str) -> timedelta:
    """Return a duration from 0 seconds."""
    try:
        duration = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        duration = timedelta(-1)
    if duration < timedelta(0):
        raise InvalidMessageError(name, f"{text!r} is not a number of seconds from 0", "use for example 30 or 0.5")
    return duration


def message_options(args: Namespace) -> dict[str, Any]:
    """Return the options of ``compose_message`` that ``schedule`` and ``send`` share."""
    return {
        "key": args.key,
        "headers": parse_headers(args.header),
        "content_type": args.content_type,
        "priority": args.priority,
    }


def read_payload(args: Namespace, *, max_bytes: int) -> str | bytes:
    """Return the text of ``--payload`` or the bytes of ``--payload-file``, of which never more than needed is read."""
    if (args.payload is None) == (args.payload_file is None):
        given = "none is given" if args.payload is None else "--payload and --payload-file are given"
        raise PayloadError("payload", given, "give one of --payload and --payload-file")
    if args.payload is not None:
        text: str = args.payload
        return text
    try:
        if args.payload_file == "-":
            data = sys.stdin.buffer.read(max_bytes + 1)
        else:
            with Path(args.payload_file).open("rb") as file:
                data = file.read(max_bytes + 1)
    except OSError as error:
        raise PayloadError(
            "payload",
            f"{args.payload_file} cannot be read ({error.strerror})",
            "give a file that this user can read to --payload-file",
        ) from None
    if len(data) > max_bytes:
        raise PayloadError(
            "payload",
            f"{args.payload_file} is larger than max_payload_bytes ({max_bytes})",
            "send a reference to the data or raise max_payload_bytes of the connection",
        )
    return data
