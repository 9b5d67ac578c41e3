"""Rejected rows of a write to the inbox, in the files and lines that the data source writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from airflow_delay_provider.spark.datasource.rejects import RejectsFolder

_JSON = {
    # Null columns are part of what a row says.
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timeZone": "UTC",
}


def stage(rejects: DataFrame, folder: RejectsFolder) -> dict[str, int]:
    """Write rejected rows into the staging folder; return the files of finished tasks, each with its number of rows."""
    lines = rejects.select(f.to_json(f.struct(*rejects.columns), _JSON))
    try:
        return dict(lines.rdd.mapPartitionsWithIndex(partial(_write_part, folder)).collect())
    except Exception:
        folder.discard()
        raise


def _write_part(folder: RejectsFolder, task: int, rows: Iterable[Row]) -> Iterator[tuple[str, int]]:
    """Write the rows of one task, each attempt into a file of its own."""
    count = 0
    with folder.open_part(f"{task:05d}-{uuid4().hex[:8]}") as part:
        for (line,) in rows:
            part.write_lines([line.encode() + b"\n"])
            count += 1
    if part.name is not None:
        yield part.name, count
