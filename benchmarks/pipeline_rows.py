"""The rows that all variants schedule: one Parquet file, read in the same batches by all that is not Spark."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_delay_provider.domain.message import Message

PAYLOAD_BYTES = 100
#: Messages of one call of the hook, and of one commit of a database.
BATCH = 1000
#: So that several tasks share a file: a task reads whole row groups.
_ROW_GROUP = 25_000
_SCHEMA = pa.schema([("id", pa.string()), ("payload", pa.binary()), ("deliver_at", pa.timestamp("us", tz="UTC"))])


def write_rows(file: Path, n: int) -> Path:
    """Write ``n`` rows with ids of their own, each due tomorrow or later."""
    source, first = random.Random(n), datetime.now(UTC) + timedelta(days=1)
    with pq.ParquetWriter(file, _SCHEMA) as writer:
        for begin in range(0, n, _ROW_GROUP):
            size = min(_ROW_GROUP, n - begin)
            columns = {
                "id": [str(UUID(int=source.getrandbits(128), version=4)) for _ in range(size)],
                "payload": [source.randbytes(PAYLOAD_BYTES) for _ in range(size)],
                "deliver_at": [first + timedelta(milliseconds=begin + number) for number in range(size)],
            }
            writer.write_table(pa.table(columns, schema=_SCHEMA))
    return file


def read_batches(file: Path) -> Iterator[list[dict[str, Any]]]:
    """Return the rows in batches."""
    with pq.ParquetFile(file) as opened:
        for batch in opened.iter_batches(BATCH):
            yield batch.to_pylist()


def messages_of(rows: list[dict[str, Any]], channel: str) -> list[Message]:
    """Return the messages of a batch."""
    return [Message(channel=channel, **row) for row in rows]
