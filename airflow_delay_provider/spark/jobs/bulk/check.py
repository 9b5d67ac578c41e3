"""The dry run: check each row as the data source would, and count; nothing is scheduled or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.spark.datasource.columns import MessageColumns
from airflow_delay_provider.spark.jobs.bulk.result import Result

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from airflow_delay_provider.domain.arguments import Limits
    from airflow_delay_provider.spark.datasource.options import WriteOptions

#: Reasons that a task reports.
EXAMPLES = 5
_SCHEMA = "rows long, field string, rejects long, reason string"


@dataclass(frozen=True, kw_only=True)
class RowCheck:
    """Checks batches of rows on executors; it has the limits of a connection, but not the connection."""

    options: WriteOptions
    limits: Limits

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        columns, rows = MessageColumns(self.options), 0
        rejects: Counter[str] = Counter()
        reasons: dict[str, str] = {}
        for batch in batches:
            rows += batch.num_rows
            for error in self._errors(columns, batch, SystemClock().now()):
                rejects[error.field] += 1
                reasons.setdefault(error.field, str(error))
        counted = [(rows, None, 0, None), *((0, field, count, reasons[field]) for field, count in rejects.items())]
        yield pa.RecordBatch.from_pylist(
            [dict(zip(("rows", "field", "rejects", "reason"), each, strict=True)) for each in counted],
            schema=pa.schema(
                [("rows", pa.int64()), ("field", pa.string()), ("rejects", pa.int64()), ("reason", pa.string())]
            ),
        )

    def _errors(self, columns: MessageColumns, batch: pa.RecordBatch, now: datetime) -> Iterator[InvalidMessageError]:
        found = columns.read(batch, now=now)
        yield from found.errors.values()
        for message in found.messages:
            try:
                self.limits.check(message, now=now)
            except InvalidMessageError as error:
                yield error


def check_rows(rows: DataFrame, check: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]) -> Result:
    """Return what the write would reject."""
    counted = rows.mapInArrow(check, _SCHEMA).collect()
    rejects: Counter[str] = Counter()
    for each in counted:
        if each["field"]:
            rejects[each["field"]] += each["rejects"]
    reasons = list(dict.fromkeys(each["reason"] for each in counted if each["reason"]))
    return Result(
        rows=sum(each["rows"] for each in counted),
        rejected=rejects.total(),
        rejected_by_column=dict(rejects),
        first_reasons=reasons[:EXAMPLES],
    )
