"""The dry run: a data source that checks each row as ``delay`` does and counts; it schedules and rejects nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import DataSource

from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.spark.connection import find_job_connection
from airflow_delay_provider.spark.datasource.columns import MessageColumns
from airflow_delay_provider.spark.datasource.locations import Location
from airflow_delay_provider.spark.datasource.options import OnRejects, WriteOptions
from airflow_delay_provider.spark.datasource.rejects import Reject
from airflow_delay_provider.spark.datasource.schema import check_schema
from airflow_delay_provider.spark.datasource.writer import DelayWriter, WriteCounts

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

    from airflow_delay_provider.brokers.port import Broker


class CheckDataSource(DataSource):
    """``df.write.format("delay_check")``: options and report are those of ``delay``."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "delay_check"

    def schema(self) -> NoReturn:
        """There is nothing to read."""
        raise NotImplementedError

    def writer(self, schema: StructType, overwrite: bool) -> CheckWriter:
        """Check what concerns all rows; the broker is not asked."""
        del overwrite
        options = WriteOptions.parse(self.options)
        check_schema(schema, channel=options.channel, parses_text=True)
        return CheckWriter(
            # Rejects are no failure of the check: it is there to count them.
            options=replace(options, on_rejects=OnRejects.KEEP),
            connection=find_job_connection(
                options.connection, hold=options.hold, connection_file=options.connection_file
            ),
            rejects=None,
            report=None if options.report is None else Location.parse("report", options.report),
        )


@dataclass(frozen=True, kw_only=True)
class CheckWriter(DelayWriter):
    """Counts what the write would reject."""

    def write(self, iterator: Iterator[RecordBatch]) -> WriteCounts:
        """Return the counts of one task."""
        counts, columns = WriteCounts(), MessageColumns(self.options)
        # A broker that is only asked for its limits connects to nothing and creates nothing.
        with self.connection.open() as broker:
            for batch in iterator:
                rejects = [Reject.of(batch, row, error) for row, error in _errors(broker, columns, batch)]
                counts.add_batch(batch.num_rows, Counter(), rejects)
        return counts


def _errors(broker: Broker, columns: MessageColumns, batch: RecordBatch) -> Iterator[tuple[int, InvalidMessageError]]:
    now = broker.clock.now()
    found = columns.read(batch, now=now)
    yield from found.errors.items()
    for number, message in zip(found.numbers, found.messages, strict=True):
        try:
            broker.check_message(message, now=now)
        except InvalidMessageError as error:
            yield number, error
