"""From ``--conn-id`` to an open hook and its ledger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_delay_provider.hooks.delay import DelayHook
    from airflow_delay_provider.ledger.database import Ledger

_CONTEXT_VARIABLE = "_AIRFLOW_PROCESS_CONTEXT"


@contextmanager
def open_hook(conn_id: str) -> Iterator[DelayHook]:
    """Open the hook of a connection and close it at the end."""
    from airflow_delay_provider.hooks.delay import DelayHook

    hook = DelayHook(conn_id)
    with connections_of_the_server():
        _require_airflow_database(conn_id)
        hook.get_conn()
    try:
        yield hook
    finally:
        hook.close()


@contextmanager
def open_ledger(conn_id: str) -> Iterator[Ledger]:
    """Open the ledger behind a connection and close it at the end."""
    with open_hook(conn_id) as hook:
        ledger: Ledger | None = getattr(hook.get_conn(), "ledger", None)
        if ledger is None:
            raise ConfigurationError(
                f"delay_conn_id: the broker of connection {conn_id!r} keeps no ledger, so its messages cannot be"
                " listed here; use a connection of type delay"
            )
        yield ledger


def _require_airflow_database(conn_id: str) -> None:
    """Refuse to take the built-in default while Airflow's database, which may define another, cannot be asked.

    Airflow says "not defined" then too, and messages would be stored in a ledger that nobody dispatches from.
    """
    if conn_id != DEFAULT_CONN_ID or f"AIRFLOW_CONN_{conn_id.upper()}" in os.environ:
        return
    from airflow import settings
    from sqlalchemy.exc import SQLAlchemyError

    if settings.engine is None:
        return
    try:
        settings.engine.connect().close()
    except SQLAlchemyError as error:
        raise ConfigurationError(
            f"delay_conn_id: Airflow's database could not say whether connection {conn_id!r} is defined"
            f" ({type(error).__name__}); start it, or define AIRFLOW_CONN_{conn_id.upper()} in the environment"
        ) from error


@contextmanager
def connections_of_the_server() -> Iterator[None]:
    """Find connections in Airflow's database too, as ``airflow connections`` does; else only the environment counts."""
    before = os.environ.get(_CONTEXT_VARIABLE)
    os.environ[_CONTEXT_VARIABLE] = "server"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CONTEXT_VARIABLE]
        else:
            os.environ[_CONTEXT_VARIABLE] = before
