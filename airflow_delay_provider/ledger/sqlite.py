"""SQLite as a ledger: durable commits, readers that never wait, and writers that take fair turns."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool

from airflow_delay_provider.exceptions import ConfigurationError

BUSY_SECONDS = 30.0
#: A commit is on disk before it is confirmed; 64 MiB of pages stay in memory; 40 MiB of changes gather before they are
#: copied into the file, so that pages which change again and again are copied once.
PRAGMAS = ("synchronous=FULL", "cache_size=-65536", "wal_autocheckpoint=10000")


def create_sqlite_engine(url: URL) -> Engine:
    """Return an engine for a file, whose folder is made, or for a database in memory."""
    options: dict[str, Any] = {}
    if url.database in (None, "", ":memory:"):
        # One connection is the database: it must be the only one and outlive every use.
        options["poolclass"] = StaticPool
    else:
        _make_folder(Path(url.database).absolute().parent)
    connect_args = {"timeout": BUSY_SECONDS, "check_same_thread": False}
    engine = create_engine(url, hide_parameters=True, connect_args=connect_args, **options)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"ledger_url: the folder {folder} cannot be created ({error.strerror}); choose another place"
        ) from error


def _prepare(connection: sqlite3.Connection, _record: object) -> None:
    # The driver's own transaction handling would begin reads late and writes without the lock.
    connection.isolation_level = None
    # Readers never wait for the writer (WAL). SQLite does not wait for this change itself.
    _retry_while_busy(lambda: connection.execute("PRAGMA journal_mode=WAL").close())
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    if not connection.get_execution_options().get("writes", False):
        connection.exec_driver_sql("BEGIN")
        return
    # A write that starts as a read cannot be upgraded while another one writes, so it takes the lock first. SQLite's
    # waits grow to 100 ms: whoever lost once would lose again to writers that come back at once.
    connection.exec_driver_sql("PRAGMA busy_timeout=0").close()
    try:
        _retry_while_busy(lambda: connection.exec_driver_sql("BEGIN IMMEDIATE").close())
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000:.0f}").close()


def _retry_while_busy(step: Callable[[], None]) -> None:
    """Try again after short random waits, which give all the same chance."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return step()
        except (sqlite3.OperationalError, OperationalError) as error:
            code = getattr(getattr(error, "orig", error), "sqlite_errorcode", sqlite3.SQLITE_OK)
            if code & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.001, 0.004))  # noqa: S311 - no secret
