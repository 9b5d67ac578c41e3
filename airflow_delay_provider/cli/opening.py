"""From ``--conn-id`` to an open hook and its ledger."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.journal import FROM_THE_START
from airflow_delay_provider.hooks.connections import connections_of_the_server

if TYPE_CHECKING:
    from airflow_delay_provider.hooks.delay import DelayHook
    from airflow_delay_provider.ledger.database import Ledger


@contextmanager
def open_hook(conn_id: str, *, hold: str | None = None) -> Iterator[DelayHook]:
    """Open the hook of a connection and close it at the end."""
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
    """Open the ledger behind a connection, with the destination that the connection's messages have in it."""
    with open_hook(conn_id) as hook:
        yield listing_of(hook)


def listing_of(hook: DelayHook) -> tuple[Ledger, str | None]:
    """Return the ledger of an open hook, with the destination that the connection's messages have in it."""
    ledger = hook.get_ledger()
    if getattr(hook.get_conn(), "ledger", None) is None:
        _warn_if_not_followed(ledger, hook.delay_conn_id)
    return ledger, hook.get_listed_destination()


@contextmanager
def open_ledger(conn_id: str) -> Iterator[Ledger]:
    """Open the ledger behind a connection and close it at the end."""
    with open_hook(conn_id) as hook:
        yield hook.get_ledger()


def _warn_if_not_followed(ledger: Ledger, conn_id: str) -> None:
    """Say why messages that the broker holds itself may be missing, beside the output that scripts read."""
    from airflow_delay_provider.ledger import projection

    with ledger.read() as connection:
        followed = projection.position_of(connection, conn_id) != FROM_THE_START
    if not followed:
        sys.stderr.write(
            f"what the broker of connection {conn_id!r} holds is not listed: no dispatcher has followed its journal"
            f" yet; run `airflow delay dispatcher --project {conn_id}`\n"
        )
