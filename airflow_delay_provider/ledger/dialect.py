"""The few statements that SQLite and PostgreSQL write differently."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    String,
    Table,
    any_,
    bindparam,
    func,
    literal,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

Upsert = sqlite.Insert | postgresql.Insert


def upsert_into(connection: Connection, table: Table) -> Upsert:
    """Return an INSERT that knows ON CONFLICT."""
    return sqlite.insert(table) if _is_sqlite(connection) else postgresql.insert(table)


def is_one_of(
    connection: Connection, column: ColumnElement[Any], values: Sequence[int] | Sequence[str]
) -> ColumnElement[bool]:
    """Match many values with one parameter, so that the statement stays the same for any number of them."""
    if _is_sqlite(connection):
        each = func.json_each(json.dumps(list(values))).table_valued("value")
        return column.in_(select(each.c.value))
    item = BigInteger() if isinstance(values[0], int) else String()
    return column == any_(bindparam(None, list(values), type_=postgresql.ARRAY(item)))


def writing_transaction(connection: Connection) -> ColumnElement[int]:
    """Return the number of the running transaction; SQLite has one writer at a time and needs none."""
    return literal(0) if _is_sqlite(connection) else _as_bigint(func.pg_current_xact_id())


def oldest_running_transaction(connection: Connection) -> ColumnElement[int]:
    """Every transaction below this number has ended."""
    if _is_sqlite(connection):
        return literal(1)
    return _as_bigint(func.pg_snapshot_xmin(func.pg_current_snapshot()))


def lock_until_commit(connection: Connection, key: int) -> None:
    """Let one transaction at a time past this point; SQLite's write lock does that already."""
    if not _is_sqlite(connection):
        connection.execute(select(func.pg_advisory_xact_lock(key)))


def _as_bigint(expression: ColumnElement[Any]) -> ColumnElement[int]:
    return expression.cast(String()).cast(BigInteger())


def _is_sqlite(connection: Connection) -> bool:
    return connection.dialect.name == "sqlite"
