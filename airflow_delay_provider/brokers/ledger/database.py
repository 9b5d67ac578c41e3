"""A ledger database: transactions, migrations, errors, and its identity."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from airflow_delay_provider.brokers.ledger import migrations
from airflow_delay_provider.brokers.ledger.dialect import create_postgresql_engine, create_sqlite_engine
from airflow_delay_provider.brokers.ledger.heartbeats import Machine, read_dispatchers, this_machine
from airflow_delay_provider.brokers.ledger.tables import ledger_identity
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError, LedgerError

ResultT = TypeVar("ResultT")
Arguments = ParamSpec("Arguments")

#: Two writers that block each other try again after a random time (B35).
CONTENTION = Backoff(initial=timedelta(milliseconds=20), cap=timedelta(seconds=1), floor=timedelta(milliseconds=5))
CONTENTION_ATTEMPTS = 8
_CONTENTION_SQLSTATES = frozenset({"40001", "40P01", "55P03"})
_MISSING_TABLE_SQLSTATES = frozenset({"42P01"})
#: Names the ledger of processes that do not read airflow.cfg.
URL_VARIABLE = "AIRFLOW__DELAY__LEDGER_URL"
REMEDY = (
    "set [delay] ledger_url to a PostgreSQL database that all machines reach, such as"
    " postgresql+psycopg://user:password@host/delay, and run `airflow delay db migrate`"
)


def default_ledger_url() -> str:
    """Return the URL of the environment, else a SQLite file in Airflow's home."""
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser().absolute()
    return os.environ.get(URL_VARIABLE) or f"sqlite:///{home / 'delay.db'}"


class Ledger:
    """A ledger database. It connects on first use, and creates the tables of a new SQLite file."""

    def __init__(self, url: str | URL) -> None:
        self.url = _parse(url)
        self.engine = _create_engine(self.url)
        # Otherwise PostgreSQL would show newer data to each statement; SQLite does not.
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
        """Whether the database may exist; does not create a SQLite file."""
        return self.dialect != "sqlite" or bool(self.url.database and Path(self.url.database).exists())

    def transact(
        self,
        work: Callable[Concatenate[Connection, Arguments], ResultT],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> ResultT:
        """Run ``work(connection, ...)`` in one write transaction and return its result after the commit.

        A failed ``work`` is rolled back. Deadlocks and lock time-outs are retried, so ``work`` may run more than once
        and must not have effects outside the transaction.
        """
        self._prepare()
        for attempt in range(1, CONTENTION_ATTEMPTS + 1):
            try:
                with self.engine.execution_options(writes=True).begin() as connection:
                    return work(connection, *args, **kwargs)
            except DBAPIError as error:
                if not _is_contention(error) or attempt == CONTENTION_ATTEMPTS:
                    raise self._translate(error) from error
                time.sleep(CONTENTION.delay(attempt, random.random).total_seconds())
            except SQLAlchemyError as error:
                raise self._translate(error) from error
        raise AssertionError("unreachable")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open one read transaction, which sees a consistent snapshot."""
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
        # A newer schema is fine: a rolling upgrade migrates the database first.
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
                require_one_machine(connection, self.name, this_machine())
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
            return create_postgresql_engine(url)
        return create_sqlite_engine(url)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise ConfigurationError(
            f"ledger_url: the driver for {url.get_backend_name()} is missing ({error});"
            " install airflow-delay-provider[postgres]"
        ) from error


def _sqlstate(error: SQLAlchemyError) -> str | None:
    return getattr(getattr(error, "orig", None), "sqlstate", None)


def _is_contention(error: DBAPIError) -> bool:
    # SQLite's writers wait for each other when they begin.
    return _sqlstate(error) in _CONTENTION_SQLSTATES


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerIdentity:
    """Identifies a ledger."""

    id: str
    #: The host that created its tables.
    host: str
    created_at: datetime


def read_identity(connection: Connection) -> LedgerIdentity:
    """Return the identity of the ledger."""
    row = connection.execute(select(ledger_identity)).one()
    return LedgerIdentity(id=row.id, host=row.host, created_at=from_ms(row.created_at_ms))


def require_one_machine(connection: Connection, name: str, machine: Machine) -> None:
    """Refuse a SQLite file that a dispatcher on another machine serves.

    The file is on a network file system then, where SQLite does not work reliably. A heartbeat from before this machine
    was started is ignored, since it may be this machine's own.
    """
    for dispatcher in read_dispatchers(connection):
        elsewhere = None not in (dispatcher.boot_id, machine.boot_id) and dispatcher.boot_id != machine.boot_id
        if elsewhere and dispatcher.is_alive and floor_ms(dispatcher.seen_at) > machine.booted_at_ms:
            raise ConfigurationError(
                f"ledger_url: {name} is a SQLite file that dispatcher {dispatcher.owner} on the machine"
                f" {dispatcher.host!r} serves, and this is {machine.host!r}; SQLite works on one machine only: {REMEDY}"
            )
