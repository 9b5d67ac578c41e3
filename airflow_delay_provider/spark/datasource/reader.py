"""The reader behind ``spark.read.format("delay")``: what the driver divides, and executors read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from airflow_delay_provider.spark.datasource import journal, messages
from airflow_delay_provider.spark.datasource.filters import OptionalPushdown, parse_filter
from airflow_delay_provider.spark.datasource.ranges import Range
from airflow_delay_provider.spark.datasource.read_options import ReadOptions, Table
from airflow_delay_provider.spark.datasource.record_batches import schema_text

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_delay_provider.spark.datasource.filters import Condition
    from airflow_delay_provider.spark.datasource.ranges import TableReader

_COLUMNS = {Table.MESSAGES: messages.COLUMNS, Table.JOURNAL: journal.COLUMNS}


def schema_of(options: ReadOptions) -> str:
    """Return the columns that are read, as Spark's SQL writes them."""
    return schema_text(options.select(_COLUMNS[options.table]))


class DelayReader(DataSourceReader):
    """Reads one table. It contains the connection, so it is never shown."""

    def __init__(self, table: TableReader) -> None:
        self._table = table
        self._conditions: list[Condition] = []

    @classmethod
    def prepare(cls, options: ReadOptions) -> DelayReader:
        """Look up the connection, here on the driver, and return what reads it."""
        open_table = messages.open_table if options.table is Table.MESSAGES else journal.open_table
        return cls(open_table(options, options.select(_COLUMNS[options.table])))

    def __repr__(self) -> str:
        return type(self).__name__

    def _push(self, filters: list[Filter]) -> Iterable[Filter]:
        """Keep the filters that the table can use; Spark applies those that are not applied exactly, too."""
        left: list[Filter] = []
        for each in filters:
            condition = parse_filter(each)
            if condition is not None:
                self._conditions.append(condition)
            if condition is None or not self._table.applies(condition):
                left.append(each)
        return left

    pushFilters = OptionalPushdown(_push)  # noqa: N815 - Spark's name

    def partitions(self) -> Sequence[InputPartition]:
        """Divide what there is now; entries and messages that come later are not read."""
        return list(self._table.divide(self._conditions))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range, on an executor."""
        if isinstance(partition, Range):
            yield from self._table.read(partition, self._conditions)
