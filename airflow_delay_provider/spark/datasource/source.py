"""The data source ``delay``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter

from airflow_delay_provider.domain.exceptions import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class DelayDataSource(DataSource):
    """Messages as DataFrames: ``df.write.format("delay")`` schedules each row."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "delay"

    def schema(self) -> StructType:
        raise _not_readable()

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        raise _not_readable()

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Check everything that can be wrong for all rows, before any is written."""
        from airflow_delay_provider.spark.datasource.options import WriteOptions
        from airflow_delay_provider.spark.datasource.schema import check_schema
        from airflow_delay_provider.spark.datasource.writer import DelayWriter

        if overwrite:
            raise ConfigurationError('mode: scheduled messages cannot be overwritten as a whole; use .mode("append")')
        options = WriteOptions.parse(self.options)
        check_schema(schema, channel=options.channel)
        return DelayWriter.prepare(options)


def _not_readable() -> ConfigurationError:
    return ConfigurationError('format: "delay" cannot be read; use df.write.format("delay")')
