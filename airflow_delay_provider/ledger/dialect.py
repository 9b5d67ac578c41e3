"""The few statements that SQLite and PostgreSQL write differently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Connection,
    String,
    Table,
    any_,
    bindparam,
    cast,
    extract,
    func,
    literal,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import Select
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import ReturningInsert

from airflow_delay_provider.ledger.records import StoredRow, stored_row

Upsert = sqlite.Insert | postgresql.Insert


def upsert_into(dialect: str, table: Table) -> Upsert:
    """Return an INSERT that knows ON CONFLICT."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


def insert_rows(connection: Connection, statement: Upsert, rows: Sequence[dict[str, Any]]) -> Sequence[StoredRow]:
    """Run an INSERT for many rows and return what it stored; rows that met a conflict and changed nothing are not."""
    insert_all = _insert_all_sqlite if _is_sqlite(connection) else _insert_all_postgresql
    return insert_all(connection, statement, rows)


def _insert_all_sqlite(
    connection: Connection, statement: Upsert, rows: Sequence[dict[str, Any]]
) -> Sequence[StoredRow]:
    # Nearly always no id is taken: then the rows numbered above the highest before are these (nobody else writes now),
    # and the driver's fast path, which returns nothing, is enough.
    seq = statement.table.c.seq
    # Not a with block: a full disk makes SQLite end the transaction, and to undo the savepoint then would hide why.
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
    """Hand rows to the driver without SQLAlchemy's work on each value, which costs more than SQLite's own."""
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
    """Match a part of a text as it is; LIKE would be another thing on each database."""
    position = func.instr(column, text) if _is_sqlite(connection) else func.strpos(column, text)
    return position > 0


def take(connection: Connection, query: Select[int]) -> list[int]:
    """Lock the rows that ``query`` finds and nobody else holds, and return their numbers.

    A step of its own: PostgreSQL may run a locking subquery of an UPDATE more than once and pass over its LIMIT.
    """
    return list(connection.execute(query.with_for_update(skip_locked=True)).scalars())


def writing_transaction(connection: Connection) -> ColumnElement[int]:
    """Return the number of the running transaction; SQLite has one writer at a time and needs none."""
    return literal(0) if _is_sqlite(connection) else _as_bigint(func.pg_current_xact_id())


def oldest_running_transaction(connection: Connection) -> ColumnElement[int]:
    """Every transaction below this number has ended."""
    if _is_sqlite(connection):
        return literal(1)
    return _as_bigint(func.pg_snapshot_xmin(func.pg_current_snapshot()))


def database_now_ms(connection: Connection) -> ColumnElement[int]:
    """Return the time of the database's own clock, which is the same for all who use it."""
    if _is_sqlite(connection):
        # Days since noon of 24 November 4714 BC; the epoch began at 2440587.5.
        return cast((func.julianday("now") - 2440587.5) * 86_400_000, BigInteger())
    return cast(extract("epoch", func.clock_timestamp()) * 1000, BigInteger())


def lock_until_commit(connection: Connection, key: int) -> None:
    """Let one transaction at a time past this point; SQLite's write lock does that already."""
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
