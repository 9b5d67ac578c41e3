"""Databases for tests, migrated quickly; names are random, so that runs beside each other never meet."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import patch
from uuid import uuid4

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from airflow_delay_provider.brokers.ledger import migrations
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.tables import ledger_identity, metadata
from tests.given import require_server
from tools.servers.component import wait_for

URL_VARIABLE = "DELAY_TEST_POSTGRES_URL"
OBJECT_IN_USE = "55006"
real_upgrade = migrations.upgrade


def require_postgres() -> str:
    """The server to create databases on; without one the test is skipped, on CI it fails."""
    return require_server(URL_VARIABLE, "PostgreSQL")


@contextmanager
def fresh_database(*, template: str | None = None) -> Iterator[str]:
    """Yield the URL of a new database, a copy of the one at ``template`` or empty, and drop it at the end."""
    url = create_database(template=template)
    try:
        yield url
    finally:
        drop_database(url)


class EmptiedDatabases:
    """Migrated databases that one test uses after the other: emptying one costs a tenth of creating one.

    Each test finds the database as the migration left it. One that is still in use, or whose tables, rights or own rows
    were changed, is dropped instead.
    """

    #: Everything of a database but its messages: tables, columns, indexes, rights, settings, and the rows that the
    #: migration itself wrote.
    _FINGERPRINT = """
        SELECT string_agg(line, chr(10) ORDER BY line) FROM (
            SELECT concat_ws(' ', c.oid::regclass, c.relkind, c.relacl, a.attname, a.atttypid, a.attnotnull,
                             pg_get_expr(d.adbin, d.adrelid)) AS line
            FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
            LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
            WHERE c.relnamespace = 'public'::regnamespace
            UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'
            UNION ALL SELECT conrelid::regclass || pg_get_constraintdef(oid) FROM pg_constraint
            WHERE connamespace = 'public'::regnamespace
            UNION ALL SELECT nspname || coalesce(nspacl::text, '') FROM pg_namespace WHERE nspname !~ '^pg_(toast|temp)'
            UNION ALL SELECT concat_ws(' ', datconnlimit, datacl) FROM pg_database WHERE datname = current_database()
            UNION ALL SELECT setconfig::text FROM pg_db_role_setting JOIN pg_database b ON b.oid = setdatabase
            WHERE datname = current_database()
            UNION ALL SELECT l::text FROM delay_ledger l
            UNION ALL SELECT v::text FROM {version_table} v
        ) everything
    """
    _EMPTY = "; ".join(
        [f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables) if table is not ledger_identity]
        + ["SELECT setval(sequencename::regclass, 1, false) FROM pg_sequences WHERE last_value IS NOT NULL"]
    )
    _OTHERS = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"

    def __init__(self, template: str) -> None:
        self._template = template
        self._free: list[str] = []
        with self._connected(template) as connection:
            self._fingerprint = self._take_fingerprint(connection)

    @contextmanager
    def lend(self) -> Iterator[str]:
        """Yield the URL of a database that is as good as new."""
        url = self._free.pop() if self._free else create_database(template=self._template)
        yield url
        if self._is_emptied(url):
            self._free.append(url)
        else:
            drop_database(url)

    def drop_all(self) -> None:
        """Drop the databases."""
        while self._free:
            drop_database(self._free.pop())

    def _is_emptied(self, url: str) -> bool:
        try:
            with self._connected(url) as connection:
                if self._is_in_use(connection) or self._take_fingerprint(connection) != self._fingerprint:
                    return False
                connection.execute(text(self._EMPTY))
                return True
        except SQLAlchemyError:
            return False

    def _is_in_use(self, connection: Connection) -> bool:
        """Whether a client is still connected and could write; a session that was just closed ends soon."""
        for _ in range(20):
            if connection.execute(text(self._OTHERS)).first() is None:
                return False
            time.sleep(0.01)
        return True

    def _take_fingerprint(self, connection: Connection) -> str | None:
        query = self._FINGERPRINT.format(version_table=migrations.VERSION_TABLE)
        found: str | None = connection.execute(text(query)).scalar()
        return found

    @contextmanager
    def _connected(self, url: str) -> Iterator[Connection]:
        engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            yield connection


def create_database(*, template: str | None = None) -> str:
    """Create a database, a copy of the one at ``template`` or empty, and return its URL."""
    server = require_postgres()
    name = f"delay_test_{uuid4().hex}"
    source = make_url(template).database if template else "template0"
    execute_when_unused(server, f'CREATE DATABASE "{name}" TEMPLATE "{source}"')
    return make_url(server).set(database=name).render_as_string(hide_password=False)


def drop_database(url: str) -> None:
    """Drop a database and end the sessions in it."""
    execute_when_unused(require_postgres(), f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)')


def execute_when_unused(url: str, statement: str) -> None:
    """Run a statement that PostgreSQL refuses while sessions that were ended a moment ago are not quite gone."""

    def is_done() -> bool:
        try:
            execute(url, statement)
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != OBJECT_IN_USE:
                raise
            return False
        return True

    wait_for(is_done, what=statement, seconds=60)


def execute(url: str, statement: str) -> None:
    """Run one statement outside of any transaction."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text(statement))


@contextmanager
def quick_sqlite_migrations(folder: Path) -> Iterator[None]:
    """Inside, a new SQLite ledger gets its tables from a copy that was migrated once, as Alembic takes 20 ms for them.

    Tests of the migrations themselves ask for the fixture ``real_migrations``.
    """
    url = f"sqlite:///{folder / 'template.db'}"
    with closing(Ledger(url)) as ledger:
        ledger.migrate()
    with closing(sqlite3.connect(folder / "template.db")) as template:
        statements = [each for each in template.iterdump() if each not in ("BEGIN TRANSACTION;", "COMMIT;")]

    def upgrade(engine: Engine) -> str:
        if engine.dialect.name != "sqlite":
            return real_upgrade(engine)
        with engine.execution_options(writes=True).begin() as connection:
            if connection.exec_driver_sql("SELECT 1 FROM sqlite_master").first() is None:
                for statement in statements:
                    connection.exec_driver_sql(statement)
                identity = {"id": str(uuid4()), "host": socket.gethostname(), "at": int(time.time() * 1000)}
                connection.execute(
                    text("UPDATE delay_ledger SET id = :id, host = :host, created_at_ms = :at"), identity
                )
                return migrations.HEAD
        return real_upgrade(engine)

    with patch.object(migrations, "upgrade", upgrade):
        yield
