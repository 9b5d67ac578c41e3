"""Found by PySpark through its name: with it, ``format("delay")`` needs no registration."""

from airflow_delay_provider.spark.datasource.source import DelayDataSource as DefaultSource

__all__ = ["DefaultSource"]
