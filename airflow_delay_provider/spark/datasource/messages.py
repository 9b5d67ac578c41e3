"""The table of messages: those that a ledger holds, and those of a broker whose journal a dispatcher copies to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.spark.connection import ListedMessages, find_job_connection, find_listed_messages
from airflow_delay_provider.spark.datasource.filters import Condition, sql_of
from airflow_delay_provider.spark.datasource.ranges import Range, TableReader, split
from airflow_delay_provider.spark.datasource.record_batches import lateness_of, make_batch, open_ledger, stream_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_delay_provider.spark.datasource.read_options import ReadOptions

_MESSAGE = scheduled_message.c
COLUMNS = {
    "id": "string",
    "channel": "string",
    "state": "string",
    "deliver_at": "timestamp",
    "scheduled_at": "timestamp",
    "dispatched_at": "timestamp",
    "lateness_ms": "bigint",
    "payload": "binary",
    "content_type": "string",
    "key": "string",
    "headers": "map<string,string>",
    "priority": "int",
    "handled_count": "int",
    "dag_id": "string",
    "run_id": "string",
    "task_id": "string",
    "map_index": "int",
    "destination": "string",
    "generation": "int",
}
_TIMES = {name: _MESSAGE[f"{name}_ms"] for name in ("deliver_at", "scheduled_at", "dispatched_at")}
_TEXTS = {
    name: _MESSAGE[name]
    for name in ("id", "channel", "state", "content_type", "key", "dag_id", "run_id", "task_id", "destination")
}
#: Rows that are in memory at once. Payloads may be large, so they are counted, too.
_ROWS = 5_000
_ROWS_WITH_PAYLOAD = 100
_BATCH_BYTES = 8 * 1024 * 1024


def open_table(options: ReadOptions, columns: Mapping[str, str]) -> MessagesTable:
    """Look up the connection on the driver."""
    connection = find_job_connection(options.connection, hold=options.hold, connection_file=options.connection_file)
    return MessagesTable(find_listed_messages(connection), columns, partitions=options.partitions)


class MessagesTable(TableReader):
    """Messages as rows, divided by their numbers.

    Each range is one query on one snapshot. A message that changes while others are read appears once, as it is when
    its range is read; one that is stored after the ranges were made does not appear.
    """

    def __init__(self, listed: ListedMessages, columns: Mapping[str, str], *, partitions: int | None) -> None:
        self._listed = listed
        self._columns = dict(columns)
        self._partitions = partitions

    def applies(self, condition: Condition) -> bool:
        return _sql_of(condition) is not None

    def divide(self, conditions: Sequence[Condition]) -> Sequence[Range]:  # noqa: ARG002 - read() applies them
        query = select(func.min(_MESSAGE.seq), func.max(_MESSAGE.seq))
        with open_ledger(self._listed.ledger) as ledger, ledger.read() as connection:
            first, last = connection.execute(query).one()
        return [] if first is None else split(first, last + 1, self._partitions)

    def read(self, part: Range, conditions: Sequence[Condition]) -> Iterator[pa.RecordBatch]:
        wanted = _stored_columns(self._columns)
        query = select(*(_MESSAGE[name] for name in wanted)).where(*self._where(part, conditions))
        has_payload = "payload" in wanted
        page_rows = _ROWS_WITH_PAYLOAD if has_payload else _ROWS
        with open_ledger(self._listed.ledger) as ledger:
            rows: list[Any] = []
            size = 0
            for page in stream_rows(ledger, query, rows=page_rows):
                rows += page
                size += sum(len(row.payload) for row in page) if has_payload else 0
                if len(rows) >= _ROWS or size >= _BATCH_BYTES:
                    yield _batch(self._columns, wanted, rows)
                    rows, size = [], 0
            if rows:
                yield _batch(self._columns, wanted, rows)

    def _where(self, part: Range, conditions: Sequence[Condition]) -> list[Any]:
        given = [sql for each in conditions if (sql := _sql_of(each)) is not None]
        if self._listed.destination is not None:
            given.append(_MESSAGE.destination == self._listed.destination)
        return [_MESSAGE.seq >= part.start, _MESSAGE.seq < part.end, *given]


def _sql_of(condition: Condition) -> Any:
    return sql_of(condition, texts=_TEXTS, times=_TIMES, translate=_stored_value)


def _stored_value(column: str, value: str) -> object:
    if column != "state":
        return value
    return State[value].value if value in State.__members__ else None


def _stored_columns(columns: Mapping[str, str]) -> list[str]:
    """Return the columns of the database that these need."""
    needed = dict[str, None]()
    for name in columns:
        if name == "lateness_ms":
            needed |= {"dispatched_at_ms": None, "deliver_at_ms": None}
        else:
            needed[f"{name}_ms" if name in _TIMES else name] = None
    return list(needed)


def _batch(columns: Mapping[str, str], stored: Sequence[str], rows: Sequence[Any]) -> pa.RecordBatch:
    values: dict[str, Any] = dict(zip(stored, zip(*rows, strict=True), strict=True))
    for name in _TIMES.keys() & columns.keys():
        values[name] = values[f"{name}_ms"]
    if "lateness_ms" in columns:
        values["lateness_ms"] = lateness_of(values["dispatched_at_ms"], values["deliver_at_ms"])
    if "state" in columns:
        values["state"] = [State(each).name for each in values["state"]]
    if "headers" in columns:
        values["headers"] = [list((each or {}).items()) for each in values["headers"]]
    return make_batch(columns, values)
