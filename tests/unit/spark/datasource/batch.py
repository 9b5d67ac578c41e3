"""Batches of rows as Spark hands them to a writer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from airflow_delay_provider.spark.datasource.columns import MessageColumns, Rows
from airflow_delay_provider.spark.datasource.options import WriteOptions

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
SOON = NOW + timedelta(hours=1)
#: Spark's types of the columns; a test may give others.
TYPES: dict[str, pa.DataType] = {
    "id": pa.string(),
    "channel": pa.string(),
    "payload": pa.string(),
    "deliver_at": pa.timestamp("us", "Europe/Berlin"),
    "deliver_after": pa.float64(),
    "key": pa.string(),
    "headers": pa.map_(pa.string(), pa.string()),
    "content_type": pa.string(),
    "priority": pa.int32(),
}


def batch_of(*rows: dict[str, Any], **types: pa.DataType) -> pa.RecordBatch:
    """Return a batch with the columns that any of the rows has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    known = TYPES | types
    return pa.record_batch({name: pa.array([row.get(name) for row in rows], known[name]) for name in names})


def read(*rows: dict[str, Any], types: dict[str, pa.DataType] | None = None, **options: Any) -> Rows:
    """Return the messages of rows that have a channel, a payload and a time unless they say otherwise."""
    full = [{"payload": "hello"} | row for row in rows]
    if not any(row.keys() & {"deliver_at", "deliver_after"} for row in rows):
        full = [row | {"deliver_at": SOON} for row in full]
    columns = MessageColumns(WriteOptions(**{"channel": "orders"} | options))
    return columns.read(batch_of(*full, **(types or {})), now=NOW)
