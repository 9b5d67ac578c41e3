"""The data source ``delay``: ``spark.read.format("delay")`` and ``df.write.format("delay")``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamWriter, DataSourceWriter

from airflow_delay_provider.domain.exceptions import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class DelayDataSource(DataSource):
    """Messages as DataFrames: reads messages and the journal, and schedules each row that is written."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "delay"

    def schema(self) -> str:
        """Return the columns that are read."""
        from airflow_delay_provider.spark.datasource.read_options import ReadOptions
        from airflow_delay_provider.spark.datasource.reader import schema_of

        return schema_of(ReadOptions.parse(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - it follows from the options
        """Look up the connection, here on the driver, and return what reads it."""
        from airflow_delay_provider.spark.datasource.read_options import ReadOptions
        from airflow_delay_provider.spark.datasource.reader import DelayReader

        return DelayReader.prepare(ReadOptions.parse(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Check everything that can be wrong for all rows, before any is written."""
        from airflow_delay_provider.spark.datasource.options import WriteOptions
        from airflow_delay_provider.spark.datasource.schema import check_schema
        from airflow_delay_provider.spark.datasource.writer import DelayWriter

        if overwrite:
            raise ConfigurationError('mode: scheduled messages cannot be overwritten as a whole; use .mode("append")')
        options = WriteOptions.parse(self.options)
        check_schema(schema, channel=options.channel, parses_text=True)
        return DelayWriter.prepare(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: ARG002, N802 - PySpark's
        """Refuse, because Spark would look up the connection again for each batch and each commit."""
        raise ConfigurationError(
            'format: "delay" is not written by streams; use foreachBatch with a function that calls'
            ' rows.write.format("delay").mode("append"), whose ids make a repeated batch harmless'
        )
