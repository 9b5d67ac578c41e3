"""The cheapest SQL that could do the ledger's work, through the driver alone: what the ledger is measured against."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from psycopg.types.array import ListBinaryDumper

from airflow_delay_provider.brokers.ledger.records import row_of
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message

_SCHEDULED, _DISPATCHED = State.SCHEDULED.value, State.DISPATCHED.value
_DUE = f"""SELECT seq FROM delay_scheduled_message
    WHERE state = {_SCHEDULED} AND destination IS NULL AND deliver_at_ms <= :now
    ORDER BY deliver_at_ms, seq LIMIT :limit"""
_UNCLAIMED_DUE = _DUE.replace("destination IS NULL", "destination IS NULL AND claimed_until_ms IS NULL")
_CLAIM = "UPDATE delay_scheduled_message SET claimed_by = 'bench', claimed_until_ms = :until WHERE seq {these}"
_MARK = f"""UPDATE delay_scheduled_message
    SET state = {_DISPATCHED}, dispatched_at_ms = :now, updated_at_ms = :now,
        claimed_by = NULL, claimed_until_ms = NULL
    WHERE seq {{these}} AND state = {_SCHEDULED} RETURNING seq, channel, deliver_at_ms"""
_ENTER_CHANNEL = """
    INSERT INTO delay_channel_message (message_seq, channel, deliver_at_ms, visible_at_ms, received_count)
    SELECT seq, channel, deliver_at_ms, 0, 0 FROM delay_scheduled_message WHERE seq {these}"""
_JOURNAL = f"""INSERT INTO delay_event (xid, message_seq, message_id, channel, change, at_ms, deliver_at_ms)
    SELECT {{xid}}, seq, id, channel, '{Change.DISPATCHED.value}', :now, deliver_at_ms
    FROM delay_scheduled_message WHERE seq {{these}}"""
_COUNT = """UPDATE delay_message_count SET n = n + :delta
    WHERE destination = '' AND channel = 'bench.0' AND state = :state"""


class Bare(ABC):
    """One connection of a driver. Counts the statements it sends."""

    begin: str
    place: str

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._texts: dict[str, str] = {}
        self.statements = 0

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def insert(self, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Store rows with one ``executemany`` and one commit."""
        places = ", ".join([self.place] * len(columns))
        statement = f"INSERT INTO delay_scheduled_message ({', '.join(columns)}) VALUES ({places})"
        self._run(self.begin)
        self._connection.cursor().executemany(statement, rows)
        self._run("COMMIT")

    def count_messages(self) -> int:
        """Return how many messages there are."""
        return self._count("true")

    def count_dispatched(self) -> int:
        """Return how many messages are dispatched."""
        return self._count(f"state = {_DISPATCHED}")

    def _count(self, condition: str) -> int:
        text = f"SELECT count(*) FROM delay_scheduled_message WHERE {condition}"
        found: int = self._connection.execute(text).fetchone()[0]
        return found

    def mark_due(self, *, now_ms: int, limit: int) -> int:
        """Only mark due messages: take and update, no channel, no journal, no counts."""
        self._run(self.begin)
        seqs = self._take(_DUE, now_ms, limit)
        if seqs:
            self._run(_MARK, seqs=self._many(seqs), now=now_ms)
        self._run("COMMIT")
        return len(seqs)

    def take_when_due(self, *, now_ms: int, limit: int) -> int:
        """Write the same rows as the ledger does when messages are due."""
        self._run(self.begin)
        seqs = self._take(_DUE, now_ms, limit)
        if seqs:
            self._deliver(seqs, now_ms)
        self._run("COMMIT")
        return len(seqs)

    def claim_ahead(self, *, now_ms: int, limit: int) -> int:
        """Claim messages before they are due, and then deliver them."""
        self._run(self.begin)
        seqs = self._take(_UNCLAIMED_DUE, now_ms, limit)
        if seqs:
            self._run(_CLAIM, seqs=self._many(seqs), until=now_ms + 60_000)
        self._run("COMMIT")
        if seqs:
            self._run(self.begin)
            self._deliver(seqs, now_ms)
            self._run("COMMIT")
        return len(seqs)

    def _deliver(self, seqs: list[int], now_ms: int) -> None:
        these = self._many(seqs)
        self._run(_MARK, seqs=these, now=now_ms)
        self._run(_ENTER_CHANNEL, seqs=these)
        self._run(_JOURNAL, seqs=these, now=now_ms)
        self._run(_COUNT, delta=-len(seqs), state=_SCHEDULED)
        self._run(_COUNT, delta=len(seqs), state=_DISPATCHED)

    def _take(self, query: str, now_ms: int, limit: int) -> list[int]:
        return [row[0] for row in self._run(query + "{lock_rows}", now=now_ms, limit=limit)]

    def _run(self, statement: str, **values: Any) -> list[Any]:
        self.statements += 1
        text = self._texts.get(statement) or self._texts.setdefault(statement, self._translate(statement))
        cursor = self._connection.execute(text, values)
        return cursor.fetchall() if cursor.description else []

    @abstractmethod
    def _translate(self, statement: str) -> str:
        """Return a statement in the dialect of the database."""

    @abstractmethod
    def _many(self, seqs: list[int]) -> Any:
        """Many numbers as one parameter."""


class BareSqlite(Bare):
    """Through sqlite3."""

    begin = "BEGIN IMMEDIATE"
    place = "?"

    def _translate(self, statement: str) -> str:
        return statement.format(these="IN (SELECT value FROM json_each(:seqs))", lock_rows="", xid="0")

    def _many(self, seqs: list[int]) -> str:
        return json.dumps(seqs)


class BarePostgres(Bare):
    """Through psycopg."""

    begin = "BEGIN"
    place = "%s"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        connection.autocommit = True
        connection.adapters.register_dumper(list, ListBinaryDumper)
        self._types: dict[str, str] = {}

    def unnest(self, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Store rows with one statement that has an array for each column."""
        types = self._column_types()
        arrays = ", ".join(f"%s::{types[name]}[]" for name in columns)
        names = ", ".join(columns)
        self._connection.execute(
            f"INSERT INTO delay_scheduled_message ({names}) SELECT * FROM unnest({arrays})",
            [list(values) for values in zip(*rows, strict=True)],
        )

    def copy(self, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Store rows with COPY in its binary format."""
        types = self._column_types()
        text = f"COPY delay_scheduled_message ({', '.join(columns)}) FROM STDIN (FORMAT BINARY)"
        with self._connection.cursor() as cursor, cursor.copy(text) as copy:
            copy.set_types([types[name] for name in columns])
            for row in rows:
                copy.write_row(row)

    def _column_types(self) -> dict[str, str]:
        if not self._types:
            found = self._connection.execute(
                "SELECT column_name, data_type FROM information_schema.columns"
                " WHERE table_name = 'delay_scheduled_message'"
            )
            self._types = {name: "varchar" if kind == "character varying" else kind for name, kind in found}
        return self._types

    def _translate(self, statement: str) -> str:
        named = re.sub(r":(\w+)", r"%(\1)s", statement)
        xid = "pg_current_xact_id()::text::bigint"
        return named.format(these="= ANY(%(seqs)s)", lock_rows=" FOR UPDATE SKIP LOCKED", xid=xid)

    def _many(self, seqs: list[int]) -> list[int]:
        return seqs


def open_bare(database_name: str, connection: Any) -> Bare:
    """Return the bare SQL of a database."""
    return {"sqlite": BareSqlite, "postgresql": BarePostgres}[database_name](connection)


def inserts_of(database_name: str) -> dict[str, Callable[..., None]]:
    """Return the ways of storing many rows with one commit: methods of what :func:`open_bare` returns."""
    ways: dict[str, Callable[..., None]] = {"bare insert": Bare.insert}
    if database_name == "postgresql":
        ways |= {"bare unnest": BarePostgres.unnest, "bare COPY": BarePostgres.copy}
    return ways


def rows_of(messages: Sequence[Message], *, now_ms: int) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return the columns and the rows that the ledger stores for ``messages``."""
    rows = [row_of(message, destination=None, now_ms=now_ms) for message in messages]
    return list(rows[0]), [tuple(row.values()) for row in rows]
