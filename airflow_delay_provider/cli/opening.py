"""From ``--conn-id`` to an open hook and its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow_delay_provider.hooks.connections import connections_of_the_server

if TYPE_CHECKING:
    from airflow_delay_provider.hooks.delay import DelayHook
    from airflow_delay_provider.ledger.database import Ledger


@contextmanager
def open_hook(conn_id: str) -> Iterator[DelayHook]:
    """Open the hook of a connection and close it at the end."""
    from airflow_delay_provider.hooks.delay import DelayHook

    hook = DelayHook(conn_id)
    with connections_of_the_server():
        hook.get_conn()
    try:
        yield hook
    finally:
        hook.close()


@contextmanager
def open_ledger(conn_id: str) -> Iterator[Ledger]:
    """Open the ledger behind a connection and close it at the end."""
    with open_hook(conn_id) as hook:
        yield hook.get_ledger()
