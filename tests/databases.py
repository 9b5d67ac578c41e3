"""Fresh PostgreSQL databases for tests; their names are random, so that runs beside each other never meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from tests.given import require_server
from tests.servers.component import wait_for

URL_VARIABLE = "DELAY_TEST_POSTGRES_URL"
OBJECT_IN_USE = "55006"


def require_postgres() -> str:
    """The server to create databases on; without one the test is skipped, on CI it fails."""
    return require_server(URL_VARIABLE, "PostgreSQL")


@contextmanager
def fresh_database(*, template: str | None = None) -> Iterator[str]:
    """Yield the URL of a new database, a copy of the one at ``template`` or empty, and drop it at the end."""
    server = require_postgres()
    name = f"delay_test_{uuid4().hex}"
    source = make_url(template).database if template else "template0"
    execute_when_unused(server, f'CREATE DATABASE "{name}" TEMPLATE "{source}"')
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        execute_when_unused(server, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


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
