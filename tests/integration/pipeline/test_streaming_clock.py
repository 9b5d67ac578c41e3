"""The clock of the dispatcher on Spark."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from airflow_delay_provider.spark.streaming.routing import CLOCK
from airflow_delay_provider.spark.streaming.source import read_clock
from tools.servers.component import wait_for


def test_every_start_begins_a_micro_batch_although_nothing_is_scheduled(spark: SparkSession, tmp_path: Path) -> None:
    """A stop between two micro-batches leaves nothing to repeat, and timers wait for the next one."""
    for _ in range(2):
        clock = read_clock(spark)
        assert clock.columns == ["shard", "bucket", "frames"]
        query = (
            clock.where(f"bucket = {CLOCK}")
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(processingTime="100 milliseconds")
            .start()
        )
        try:
            wait_for(
                lambda query=query: len([each for each in query.recentProgress if each["numInputRows"] == 1]) >= 2,
                what="micro-batches follow each other",
                seconds=120,
            )
        finally:
            query.stop()
