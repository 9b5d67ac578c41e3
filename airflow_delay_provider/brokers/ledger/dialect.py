"""Where SQLite and PostgreSQL differ: their engines, and a few statements."""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    String,
    Table,
    any_,
    bindparam,
    cast,
    create_engine,
    event,
    extract,
    func,
    literal,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool
from sqlalchemy.sql import Select
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import ReturningInsert

from airflow_delay_provider.brokers.ledger.records import AnyRow, StoredRow, stored_row
from airflow_delay_provider.domain.exceptions import ConfigurationError

Upsert = sqlite.Insert | postgresql.Insert
POSTGRES_CONNECT_SECONDS = 10
BUSY_SECONDS = 30.0
#: A commit is on disk before it is confirmed; 64 MiB of pages stay in memory; 40 MiB of changes gather before they are
#: copied into the file, so that pages which change again and again are copied once.
PRAGMAS = ("synchronous=FULL", "cache_size=-65536", "wal_autocheckpoint=10000")


def upsert_into(dialect: str, table: Table) -> Upsert:
    """Return an INSERT that supports ON CONFLICT."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


def insert_rows(connection: Connection, statement: Upsert, rows: Sequence[dict[str, Any]]) -> Sequence[StoredRow]:
    """Insert many rows and return those that were stored or changed, without those that a conflict left unchanged."""
    insert_all = _insert_all_sqlite if _is_sqlite(connection) else _insert_all_postgresql
    return insert_all(connection, statement, rows)


def _insert_all_sqlite(
    connection: Connection, statement: Upsert, rows: Sequence[dict[str, Any]]
) -> Sequence[StoredRow]:
    # Usually no id is taken. No other transaction writes now, so the rows above the highest number are these, and the
    # driver's fast path, which returns nothing, is enough.
    seq = statement.table.c.seq
    # Not a with block: on a full disk SQLite ends the transaction, and undoing the savepoint would hide the reason.
    attempt = connection.begin_nested()
    highest = connection.execute(select(func.coalesce(func.max(seq), 0))).scalar_one()
    _executemany(connection, statement, rows)
    seqs = connection.execute(select(seq).where(seq > highest).order_by(seq)).scalars().all()
    if len(seqs) == len(rows):
        attempt.commit()
        return [stored_row(row, number) for row, number in zip(rows, seqs, strict=True)]
    attempt.rollback()
    return [StoredRow(*row) for row in connection.execute(_returning(statement), rows)]


def _executemany(connection: Connection, statement: Upsert, rows: Sequence[dict[str, Any]]) -> None:
    """Pass rows to the driver without SQLAlchemy's processing of each value, which costs more than SQLite's own."""
    compiled = _compile_sqlite(statement, tuple(rows[0]))
    names = compiled.positiontup or []
    values_of = itemgetter(*names[: len(rows[0])])
    # What the ON CONFLICT clause compares with stands behind the values.
    constants = tuple([compiled.params[name] for name in names[len(rows[0]) :]])
    as_json = [column.name for column in statement.table.columns if isinstance(column.type, JSON)]
    parameters = []
    for row in rows:
        for name in as_json:
            if row[name] is not None:
                row = row | {name: json.dumps(row[name])}
        parameters.append(values_of(row) + constants)
    connection.exec_driver_sql(str(compiled), parameters)


@lru_cache
def _compile_sqlite(statement: Upsert, columns: tuple[str, ...]) -> SQLCompiler:
    return statement.compile(dialect=sqlite.dialect(), column_keys=list(columns))


def _insert_all_postgresql(
    connection: Connection, statement: Upsert, rows: Sequence[dict[str, Any]]
) -> Sequence[StoredRow]:
    # One array a column, or one value where all rows agree: a short statement for any number of rows.
    columns = [column for column in statement.table.columns if column.name in rows[0]]
    values = {column.name: [row[column.name] for row in rows] for column in columns}
    common = {name for name, given in values.items() if given.count(given[0]) == len(given)} - {"id"}
    varying = [column for column in columns if column.name not in common]
    unnested = (
        func.unnest(*(_array(column, values[column.name]) for column in varying))
        .table_valued(*(column.name for column in varying))
        .render_derived()
    )
    source = select(
        *(
            literal(values[column.name][0], column.type)
            if column.name in common
            else unnested.c[column.name].cast(column.type)
            for column in columns
        )
    )
    insert = statement.from_select([column.name for column in columns], source)
    return [StoredRow(*row) for row in connection.execute(_returning(insert))]


def _returning(statement: Upsert) -> ReturningInsert[Any]:
    return statement.returning(*(statement.table.c[name] for name in StoredRow._fields))


def is_one_of(
    connection: Connection, column: ColumnElement[Any], values: Sequence[int] | Sequence[str]
) -> ColumnElement[bool]:
    """Match many values with one parameter, so that the statement stays the same for any number of them."""
    if _is_sqlite(connection):
        each = func.json_each(json.dumps(list(values))).table_valued("value")
        return column.in_(select(each.c.value))
    item = BigInteger() if isinstance(values[0], int) else String()
    return column == any_(bindparam(None, list(values), type_=postgresql.ARRAY(item)))


def contains(connection: Connection, column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    """Match a part of a text exactly; LIKE differs between the databases."""
    position = func.instr(column, text) if _is_sqlite(connection) else func.strpos(column, text)
    return position > 0


def take(connection: Connection, query: Select[int]) -> list[int]:
    """Lock the rows that ``query`` finds and no other transaction has locked, and return their numbers."""
    return [row[0] for row in lock_free_rows(connection, query)]


def lock_free_rows(connection: Connection, query: Select[*tuple[Any, ...]]) -> Sequence[AnyRow]:
    """Lock the rows that ``query`` finds and no other transaction has locked, and return them.

    A step of its own: PostgreSQL may run a locking subquery of an UPDATE more than once and pass over its LIMIT.
    """
    return connection.execute(query.with_for_update(skip_locked=True)).all()


def writing_transaction(connection: Connection) -> ColumnElement[int]:
    """Return the number of the running transaction; SQLite has one writer at a time and needs none."""
    return literal(0) if _is_sqlite(connection) else _as_bigint(func.pg_current_xact_id())


def oldest_running_transaction(connection: Connection) -> ColumnElement[int]:
    """Return a number; every transaction below it has ended."""
    if _is_sqlite(connection):
        return literal(1)
    return _as_bigint(func.pg_snapshot_xmin(func.pg_current_snapshot()))


def database_now_ms(connection: Connection) -> ColumnElement[int]:
    """Return the time of the database's clock, which is the same for all clients."""
    if _is_sqlite(connection):
        # Days since noon of 24 November 4714 BC; the epoch began at 2440587.5.
        return cast((func.julianday("now") - 2440587.5) * 86_400_000, BigInteger())
    # The same in all columns of one statement, unlike clock_timestamp().
    return cast(extract("epoch", func.statement_timestamp()) * 1000, BigInteger())


def lock_until_commit(connection: Connection, key: int) -> None:
    """Let one transaction at a time pass; SQLite's write lock does so anyway."""
    if not _is_sqlite(connection):
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def _array(column: ColumnElement[Any], values: Sequence[Any]) -> ColumnElement[Any]:
    if isinstance(column.type, JSON):
        texts = [None if value is None else json.dumps(value) for value in values]
        return bindparam(None, texts, type_=postgresql.ARRAY(String()))
    return bindparam(None, values, type_=postgresql.ARRAY(column.type))


def _as_bigint(expression: ColumnElement[Any]) -> ColumnElement[int]:
    return expression.cast(String()).cast(BigInteger())


def _is_sqlite(connection: Connection) -> bool:
    return connection.dialect.name == "sqlite"


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


def create_postgresql_engine(url: URL) -> Engine:
    """Return an engine for a server."""
    connect_args = {"connect_timeout": POSTGRES_CONNECT_SECONDS, "application_name": "airflow-delay"}
    engine = create_engine(url, pool_pre_ping=True, hide_parameters=True, connect_args=connect_args)

    def send_arrays_in_binary(connection: Any, _record: object) -> None:
        # As text every element would be searched for characters to escape, and payloads would double.
        from psycopg.types.array import ListBinaryDumper

        connection.adapters.register_dumper(list, ListBinaryDumper)

    event.listen(engine, "connect", send_arrays_in_binary)
    return engine


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"ledger_url: the folder {folder} cannot be created ({error.strerror}); choose another path"
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
    # waits grow to 100 ms: a writer that lost once would lose again to writers that come back at once.
    connection.exec_driver_sql("PRAGMA busy_timeout=0").close()
    try:
        _retry_while_busy(lambda: connection.exec_driver_sql("BEGIN IMMEDIATE").close())
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000:.0f}").close()


def _retry_while_busy(step: Callable[[], None]) -> None:
    """Try again after short random pauses, which give all writers the same chance."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return step()
        except (sqlite3.OperationalError, OperationalError) as error:
            code = getattr(getattr(error, "orig", error), "sqlite_errorcode", sqlite3.SQLITE_OK)
            if code & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.001, 0.004))  # noqa: S311 - no secret
