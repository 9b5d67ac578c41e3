"""Read command-line options, and open the connection that they name."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.domain.exceptions import InvalidMessageError, PayloadError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START
from airflow_delay_provider.hooks.connections import connections_of_the_server

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.hooks.delay import DelayHook


def parse_headers(pairs: Sequence[str] | None) -> dict[str, str]:
    """Return the headers of ``NAME=VALUE`` pairs."""
    headers: dict[str, str] = {}
    for pair in pairs or ():
        name, sign, value = pair.partition("=")
        if not name or not sign:
            raise InvalidMessageError("headers", f"{pair!r} is not a header", "use NAME=VALUE")
        if name in headers:
            raise InvalidMessageError("headers", f"{name!r} is given twice", "give each header once")
        headers[name] = value
    return headers


def parse_seconds(name: str, text: str) -> timedelta:
    """Return a duration of at least 0 seconds."""
    try:
        duration = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        duration = timedelta(-1)
    if duration < timedelta(0):
        raise InvalidMessageError(name, f"{text!r} is not a duration in seconds", "use for example 30 or 0.5")
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
    """Return the text of ``--payload`` or the bytes of ``--payload-file``; read no more than the limit."""
    if (args.payload is None) == (args.payload_file is None):
        given = "missing" if args.payload is None else "given twice"
        raise PayloadError("payload", given, "give either --payload or --payload-file")
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
            "name a file that you can read",
        ) from None
    if len(data) > max_bytes:
        raise PayloadError(
            "payload",
            f"{args.payload_file} is larger than max_payload_bytes ({max_bytes})",
            "send a reference to the data, or raise max_payload_bytes in the connection",
        )
    return data


@contextmanager
def open_hook(conn_id: str, *, hold: str | None = None) -> Iterator[DelayHook]:
    """Open the hook of a connection, and close it afterwards."""
    from airflow_delay_provider.hooks.delay import DelayHook

    hook = DelayHook(conn_id, hold=hold)
    with connections_of_the_server():
        hook.get_conn()
    try:
        yield hook
    finally:
        hook.close()


@contextmanager
def open_listing(conn_id: str) -> Iterator[tuple[Ledger, str | None]]:
    """Open the ledger of a connection, with the destination under which it lists the connection's messages."""
    with open_hook(conn_id) as hook:
        yield listing_of(hook)


def listing_of(hook: DelayHook) -> tuple[Ledger, str | None]:
    """Return the ledger of an open hook, with the destination under which it lists the connection's messages."""
    ledger = hook.get_ledger()
    if hook.get_conn().ledger is None:
        _warn_if_not_indexed(ledger, hook.delay_conn_id)
    return ledger, hook.get_listed_destination()


@contextmanager
def open_ledger(conn_id: str) -> Iterator[Ledger]:
    """Open the ledger of a connection, and close it afterwards."""
    with open_hook(conn_id) as hook:
        yield hook.get_ledger()


def _warn_if_not_indexed(ledger: Ledger, conn_id: str) -> None:
    """Explain on stderr why messages that the broker holds are missing in the list."""
    from airflow_delay_provider.brokers.ledger import projection

    with ledger.read() as connection:
        indexed = projection.position_of(connection, conn_id) != FROM_THE_START
    if not indexed:
        sys.stderr.write(
            f"warning: messages that the broker of connection {conn_id!r} holds are not listed, because no dispatcher"
            f" indexes them; run `airflow delay dispatcher --index {conn_id}`\n"
        )
