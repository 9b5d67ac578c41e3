"""Arrow batches as Spark expects them, made from columns of plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from sqlalchemy.sql import Select

from airflow_delay_provider.spark.connection import JobConnection

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.brokers.ledger.records import AnyRow

TIME = "timestamp"
_TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    TIME: pa.timestamp("us", tz="UTC"),
}


def schema_text(columns: Mapping[str, str]) -> str:
    """Return columns and their types as Spark's SQL writes them."""
    return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())


def make_batch(columns: Mapping[str, str], values: Mapping[str, Any]) -> pa.RecordBatch:
    """Return a batch with these columns; times are given in milliseconds."""
    arrays = [
        _times(values[name]) if kind == TIME else _array(values[name], _TYPES[kind]) for name, kind in columns.items()
    ]
    schema = pa.schema([(name, _TYPES[kind]) for name, kind in columns.items()])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def lateness_of(at_ms: Any, deliver_at_ms: Any) -> pa.Array:
    """Return the difference of two columns of milliseconds; null where one is null."""
    import pyarrow.compute as pc

    return pc.subtract(milliseconds(at_ms), milliseconds(deliver_at_ms))


def milliseconds(values: Any) -> pa.Array:
    """Return a column of whole numbers."""
    return _array(values, pa.int64())


def _times(values: Any) -> pa.Array:
    # An exact change of the unit, done by Arrow for the whole column.
    return milliseconds(values).cast(pa.timestamp("ms", tz="UTC")).cast(_TYPES[TIME])


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, type=kind)


@contextmanager
def open_ledger(connection: JobConnection) -> Iterator[Ledger]:
    """Open the ledger of a connection and close it at the end."""
    with closing(connection.open()) as broker:
        ledger = broker.ledger
        if ledger is None:
            raise AssertionError(f"{connection.conn_id} has no ledger")
        yield ledger


def stream_rows(ledger: Ledger, query: Select[Any], *, rows: int) -> Iterator[Sequence[AnyRow]]:
    """Run a query with a cursor of the server, and return its rows in pages; one page at a time is in memory."""
    with ledger.read() as connection:
        result = connection.execution_options(stream_results=True, max_row_buffer=rows).execute(query)
        while page := result.fetchmany(rows):
            yield page
