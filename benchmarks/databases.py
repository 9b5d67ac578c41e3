"""Fresh databases on SQLite and PostgreSQL, and rows for them in bulk."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from sqlalchemy.engine import make_url

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.dialect import BUSY_SECONDS, PRAGMAS
from airflow_delay_provider.domain.lifecycle import Change, State
from benchmarks.measurement import Results, say

URL_VARIABLE = "DELAY_TEST_POSTGRES_URL"
PAYLOAD_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Messages to load: the first are dispatched, the last wait, each due ``step_ms`` after the one before."""

    total: int
    dispatched: int = 0
    #: One in so many is cancelled, spread evenly; 0 is none.
    cancelled_every: int = 0
    channels: int = 1
    first_due_ms: int
    step_ms: int = 1
    journal: bool = True


class Database(ABC):
    """A place for fresh ledgers."""

    name: str

    @abstractmethod
    def create(self) -> str:
        """Return the URL of a new, migrated ledger."""

    @abstractmethod
    def copy(self, url: str) -> str:
        """Return the URL of a copy of a ledger that no process uses."""

    @abstractmethod
    def drop(self, url: str) -> None:
        """Remove a ledger."""

    @abstractmethod
    def connect(self, url: str) -> Any:
        """Return a connection of the driver, without SQLAlchemy, with the settings of the ledger's own."""

    @abstractmethod
    def load(self, url: str, rows: Rows) -> None:
        """Fill a ledger in one transaction, with SQL that makes the rows in the database."""

    @abstractmethod
    def analyze(self, url: str) -> None:
        """Let the database write out and analyze the loaded rows, so that no measurement pays for it."""

    @contextmanager
    def fresh(self, template: str | None = None) -> Iterator[str]:
        """Yield the URL of a new ledger, or of a copy of ``template``, and remove it at the end."""
        url = self.create() if template is None else self.copy(template)
        try:
            yield url
        finally:
            self.drop(url)


class Sqlite(Database):
    """Files in one folder."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self) -> str:
        url = self._new_url()
        _migrate(url)
        return url

    def copy(self, url: str) -> str:
        new_url = self._new_url()
        shutil.copyfile(_path(url), _path(new_url))
        return new_url

    def drop(self, url: str) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(_path(url) + suffix).unlink(missing_ok=True)

    def connect(self, url: str) -> sqlite3.Connection:
        connection = sqlite3.connect(_path(url), isolation_level=None, timeout=BUSY_SECONDS)
        for pragma in ("journal_mode=WAL", *PRAGMAS):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def load(self, url: str, rows: Rows) -> None:
        series = f"WITH RECURSIVE g(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM g WHERE i + 1 < {rows.total})"
        with closing(self.connect(url)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _load_statements(
                rows,
                series=series,
                source="g",
                random_id="lower(hex(randomblob(16)))",
                payload=f"randomblob({PAYLOAD_BYTES})",
                xid="0",
            ):
                connection.execute(statement)
            connection.execute("COMMIT")

    def analyze(self, url: str) -> None:
        with closing(self.connect(url)) as connection:
            connection.execute("ANALYZE")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _new_url(self) -> str:
        return f"sqlite:///{self._folder / f'ledger_{uuid4().hex}.db'}"


class Postgres(Database):
    """Databases on one server."""

    name = "postgresql"

    def __init__(self, server_url: str) -> None:
        self._server = make_url(server_url)

    def create(self) -> str:
        url = self._new("template0")
        _migrate(url)
        return url

    def copy(self, url: str) -> str:
        return self._new(make_url(url).database or "")

    def drop(self, url: str) -> None:
        self._execute(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)')

    def connect(self, url: str) -> psycopg.Connection[Any]:
        return psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(hide_password=False))

    def load(self, url: str, rows: Rows) -> None:
        with closing(self.connect(url)) as connection:
            for statement in _load_statements(
                rows,
                series="",
                source=f"generate_series(0, {rows.total - 1}) AS g(i)",
                random_id="replace(gen_random_uuid()::text, '-', '')",
                payload=f"decode(repeat(md5(i::text), {PAYLOAD_BYTES // 16}), 'hex')",
                xid="pg_current_xact_id()::text::bigint",
            ):
                connection.execute(statement)
            connection.commit()

    def analyze(self, url: str) -> None:
        with closing(self.connect(url)) as connection:
            connection.autocommit = True
            connection.execute("VACUUM (ANALYZE)")
            connection.execute("CHECKPOINT")

    def version(self) -> str:
        """Return the server's version."""
        with closing(self.connect(self._server.render_as_string(hide_password=False))) as connection:
            return str(connection.info.server_version // 10000)

    def _new(self, template: str) -> str:
        name = f"delay_bench_{uuid4().hex}"
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self._server.set(database=name).render_as_string(hide_password=False)

    def _execute(self, statement: str) -> None:
        with closing(self.connect(self._server.render_as_string(hide_password=False))) as connection:
            connection.autocommit = True
            connection.execute(statement)


def open_databases(folder: Path) -> list[Database]:
    """Return SQLite in ``folder``, and PostgreSQL when the environment names a server."""
    server = os.environ.get(URL_VARIABLE)
    return [Sqlite(folder), Postgres(server)] if server else [Sqlite(folder)]


def _load_statements(rows: Rows, *, series: str, source: str, random_id: str, payload: str, xid: str) -> Iterator[str]:
    cancelled = f"WHEN i % {rows.cancelled_every} = 0 THEN {State.CANCELLED.value}" if rows.cancelled_every else ""
    state = (
        f"CASE {cancelled} WHEN i < {rows.dispatched} THEN {State.DISPATCHED.value} ELSE {State.SCHEDULED.value} END"
    )
    due = f"{rows.first_due_ms} + CAST(i AS BIGINT) * {rows.step_ms}"
    yield f"""
        INSERT INTO delay_scheduled_message (id, channel, state, deliver_at_ms, scheduled_at_ms, updated_at_ms,
            dispatched_at_ms, payload, content_type, priority, handled_count, generation)
        {series}
        SELECT {random_id}, 'bench.' || (i % {rows.channels}), {state}, {due}, {rows.first_due_ms}, {due},
            CASE WHEN {state} = {State.DISPATCHED.value} THEN {due} END, {payload}, 'application/octet-stream', 0, 0, 0
        FROM {source}"""
    if rows.journal:
        yield f"""
            INSERT INTO delay_event (xid, message_seq, message_id, channel, change, at_ms, deliver_at_ms)
            SELECT {xid}, seq, id, channel, '{Change.SCHEDULED.value}', scheduled_at_ms, deliver_at_ms
            FROM delay_scheduled_message ORDER BY seq"""
    yield """
        INSERT INTO delay_message_count (destination, channel, state, n)
        SELECT '', channel, state, count(*) FROM delay_scheduled_message GROUP BY channel, state"""


def _migrate(url: str) -> None:
    ledger = Ledger(url)
    ledger.migrate()
    ledger.close()


def _path(url: str) -> str:
    return make_url(url).database or ""


def run_on_databases(run: Callable[[Sequence[Database]], Results]) -> tuple[Results, dict[str, Any]]:
    """Measure on fresh databases; return the results and the databases' versions."""
    with tempfile.TemporaryDirectory(prefix="delay-bench-") as scratch:
        databases = open_databases(Path(scratch))
        if len(databases) == 1:
            say(f"{URL_VARIABLE} is not set: SQLite alone is measured")
        found = run(databases)
    server = next((database.version() for database in databases if isinstance(database, Postgres)), None)
    return found, {"sqlite": sqlite3.sqlite_version, "postgresql": server}
