"""The schema's history, run by Alembic with a version table of its own."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

VERSION_TABLE = "delay_alembic_version"
HEAD = "0005"
#: Any number: one migration at a time on PostgreSQL.
_MIGRATION_LOCK = 5_390_117_422
#: Alembic keeps what it is doing in module globals, so threads of one process take turns too.
_ONE_AT_A_TIME = threading.Lock()


def current(engine: Engine) -> str | None:
    """Return the revision of the database, None when it was never migrated."""
    with engine.connect() as connection:
        return _current(connection)


def upgrade(engine: Engine) -> str:
    """Bring the database to ``HEAD``; processes that do so at once wait for each other."""
    _run(engine, "upgrade", HEAD)
    return HEAD


def downgrade(engine: Engine, revision: str = "base") -> None:
    """Take the database back to ``revision``."""
    _run(engine, "downgrade", revision)


def _run(engine: Engine, direction: str, revision: str) -> None:
    from alembic import command
    from alembic.config import Config

    with _ONE_AT_A_TIME, engine.execution_options(writes=True).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        if _current(connection) == revision:
            return
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        getattr(command, direction)(config, revision)


def _current(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
    return revision
