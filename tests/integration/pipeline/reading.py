"""Reading with the data source, with Spark and without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import Filter
from pyspark.sql.types import StructType

from airflow_delay_provider.spark.datasource.reader import DelayReader
from airflow_delay_provider.spark.datasource.source import DelayDataSource

NAME = "ledger"


def write_connection(folder: Path, ledger_url: str) -> str:
    """Write a file with one connection, to a ledger, and return its path."""
    file = folder / "connections.json"
    file.write_text(json.dumps({NAME: {"conn_type": "delay", "extra": {"ledger_url": ledger_url}}}))
    return str(file)


def make_reader(**options: str) -> DelayReader:
    """Return the reader that Spark would make on the driver."""
    reader = DelayDataSource(options).reader(StructType())
    assert isinstance(reader, DelayReader)
    return reader


def read_rows(filters: Sequence[Filter] = (), **options: str) -> list[dict[str, Any]]:
    """Read as Spark does, in this process, and return the rows."""
    reader = make_reader(**options)
    list(reader.pushFilters(list(filters)))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
