"""One ledger database: its engine, its transactions, and its errors in this package's words."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.exceptions import ConfigurationError, InvalidMessageError, LedgerError
from airflow_delay_provider.ledger import identity, migrations
from airflow_delay_provider.ledger.machine import this_machine
from airflow_delay_provider.ledger.sqlite import create_sqlite_engine

ResultT = TypeVar("ResultT")

#: Two writers that block each other try again after a random moment (B35).
CONTENTION = Backoff(initial=timedelta(milliseconds=20), cap=timedelta(seconds=1), floor=timedelta(milliseconds=5))
CONTENTION_ATTEMPTS = 8
_CONTENTION_SQLSTATES = frozenset({"40001", "40P01", "55P03"})
_MISSING_TABLE_SQLSTATES = frozenset({"42P01"})
POSTGRES_CONNECT_SECONDS = 10


class Ledger:
    """A ledger database. Cheap to make: it connects on first use and creates the tables of a new SQLite file."""

    def __init__(self, url: str | URL) -> None:
        self.url = _parse(url)
        self.engine = _create_engine(self.url)
        # PostgreSQL would otherwise show each statement a later moment; SQLite never does.
        self._snapshots = (
            self.engine.execution_options(isolation_level="REPEATABLE READ")
            if self.dialect == "postgresql"
            else self.engine
        )
        self._ready = False

    @property
    def name(self) -> str:
        """The URL without its password."""
        return self.url.render_as_string(hide_password=True)

    @property
    def dialect(self) -> str:
        """Either ``sqlite`` or ``postgresql``."""
        return self.url.get_backend_name()

    @property
    def is_there(self) -> bool:
        """Whether there may be something to read; a SQLite file is not made by asking."""
        return self.dialect != "sqlite" or bool(self.url.database and Path(self.url.database).exists())

    def transact(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Run ``work`` in one write transaction and return its result after the commit.

        Nothing of a failed ``work`` stays. Deadlocks and lock time-outs are tried again, so ``work`` may run more than
        once and must not have effects outside the transaction.
        """
        self._prepare()
        for attempt in range(1, CONTENTION_ATTEMPTS + 1):
            try:
                with self.engine.execution_options(writes=True).begin() as connection:
                    return work(connection)
            except DBAPIError as error:
                if not _is_contention(error) or attempt == CONTENTION_ATTEMPTS:
                    raise self._translate(error) from error
                time.sleep(CONTENTION.delay(attempt, random.random).total_seconds())
            except SQLAlchemyError as error:
                raise self._translate(error) from error
        raise AssertionError("unreachable")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open one read transaction: everything read inside is of one moment."""
        self._prepare()
        try:
            with self._snapshots.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise self._translate(error, "could not be read", "") from error

    def migrate(self) -> str:
        """Create or upgrade the tables and return the schema revision; a newer one stays as it is."""
        revision = self.revision()
        if revision is not None and revision >= migrations.HEAD:
            return revision
        try:
            return migrations.upgrade(self.engine)
        except SQLAlchemyError as error:
            raise self._translate(error) from error

    def downgrade(self, revision: str) -> None:
        """Take the tables back to an older revision; ``base`` drops them with every message."""
        from alembic.util.exc import CommandError

        try:
            migrations.downgrade(self.engine, revision)
        except CommandError:
            raise InvalidMessageError(
                "revision", f"{revision!r} is not older than {self.revision()}", "use base, or a revision before it"
            ) from None
        except SQLAlchemyError as error:
            raise self._translate(error) from error
        self._ready = False

    def require_schema(self) -> str:
        """Return the schema revision; refuse one that this version cannot work with."""
        revision = self.revision()
        # A newer schema is fine: in a rolling upgrade the database comes first.
        if revision is None or revision < migrations.HEAD:
            raise LedgerError(
                f"the ledger at {self.name} has schema revision {revision}, this version needs {migrations.HEAD};"
                " run `airflow delay db migrate`"
            )
        return revision

    def revision(self) -> str | None:
        """Return the schema revision of the database, None before the first migration."""
        try:
            return migrations.current(self.engine)
        except SQLAlchemyError as error:
            raise self._translate(error, "cannot be reached", "") from error

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def _prepare(self) -> None:
        if self._ready:
            return
        if self.dialect == "sqlite" and self.revision() is None:
            self.migrate()
        self.require_schema()
        self._require_one_machine()
        self._ready = True

    def _require_one_machine(self) -> None:
        if self.dialect != "sqlite":
            return
        try:
            with self.engine.connect() as connection:
                identity.require_one_machine(connection, self.name, this_machine())
        except SQLAlchemyError as error:
            raise self._translate(error, "could not be read", "") from error

    def _translate(
        self,
        error: SQLAlchemyError,
        problem: str = "did not confirm",
        consequence: str = " with the same ids: nothing of this call is known to be stored",
    ) -> LedgerError:
        cause = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        if _sqlstate(error) in _MISSING_TABLE_SQLSTATES:
            return LedgerError(f"the ledger at {self.name} has no tables; run `airflow delay db migrate`")
        return LedgerError(
            f"the ledger at {self.name} {problem} ({cause}); check that the database runs and accepts this user,"
            f" then try again{consequence}"
        )


def _parse(url: str | URL) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise ConfigurationError(
            f"ledger_url: not a database URL ({type(error).__name__}); use sqlite:////path/to/ledger.db or"
            " postgresql+psycopg://user:password@host/database"
        ) from None
    if parsed.get_backend_name() in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "sqlite":
        return parsed.set(drivername="sqlite")
    raise ConfigurationError(
        f"ledger_url: {parsed.get_backend_name()!r} is not supported; use sqlite or postgresql+psycopg"
    )


def _create_engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() == "postgresql":
            return _create_postgresql_engine(url)
        return create_sqlite_engine(url)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigurationError(
            f"ledger_url: the driver for {url.get_backend_name()} is missing ({error});"
            " install airflow-delay-provider[postgres]"
        ) from error


def _create_postgresql_engine(url: URL) -> Engine:
    connect_args = {"connect_timeout": POSTGRES_CONNECT_SECONDS, "application_name": "airflow-delay"}
    engine = create_engine(url, pool_pre_ping=True, hide_parameters=True, connect_args=connect_args)

    def send_arrays_in_binary(connection: Any, _record: object) -> None:
        # As text every element would be searched for characters to escape, and payloads would double.
        from psycopg.types.array import ListBinaryDumper

        connection.adapters.register_dumper(list, ListBinaryDumper)

    event.listen(engine, "connect", send_arrays_in_binary)
    return engine


def _sqlstate(error: SQLAlchemyError) -> str | None:
    return getattr(getattr(error, "orig", None), "sqlstate", None)


def _is_contention(error: DBAPIError) -> bool:
    # SQLite's writers have waited for each other at their begin.
    return _sqlstate(error) in _CONTENTION_SQLSTATES
