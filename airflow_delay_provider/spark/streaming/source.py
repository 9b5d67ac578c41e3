"""What Spark reads: the topics of a ladder, and a clock that makes micro-batches follow each other."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import SparkContext, SparkFiles
from pyspark.sql import DataFrame, SparkSession

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.reader import PartitionId
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.inbox.java_client import JavaClientSettings
from airflow_delay_provider.spark.inbox.secret_file import settings_from_file
from airflow_delay_provider.spark.streaming.routing import CLOCK

#: Settings of Java's producer, which a consumer does not have.
_OF_PRODUCERS = {
    "acks",
    "batch.size",
    "buffer.memory",
    "compression.type",
    "delivery.timeout.ms",
    "enable.idempotence",
    "linger.ms",
    "max.block.ms",
    "max.request.size",
}
_FILE = "${file:"


@contextmanager
def source_options(
    context: SparkContext, config: KafkaConfig, partitions: Sequence[PartitionId], starts: Mapping[PartitionId, int]
) -> Iterator[dict[str, str]]:
    """Yield the options of Spark's Kafka source, for as long as it is used; no secret is among them."""
    offsets: dict[str, dict[str, int]] = defaultdict(dict)
    for topic, partition in partitions:
        # -2 is the first record.
        offsets[topic][str(partition)] = starts.get((topic, partition), -2)
    settings = JavaClientSettings.of(config)
    plain = {name: value for name, value in settings.plain.items() if name not in _OF_PRODUCERS}
    with settings_from_file(context, settings.secret) as hidden, _copied_for_driver(hidden):
        yield {
            **{f"kafka.{name}": value for name, value in {**plain, **hidden}.items()},
            "kafka.isolation.level": "read_committed",
            # Most partitions of a ladder end with the marks of transactions: there is nothing to wait for.
            "kafka.fetch.max.wait.ms": "20",
            "groupIdPrefix": f"{config.topology.prefix}.spark.source",
            "subscribe": ",".join(sorted(offsets)),
            "startingOffsets": json.dumps(offsets),
            "includeHeaders": "true",
            "failOnDataLoss": "true",
        }


def read_clock(spark: SparkSession) -> DataFrame:
    """Return one row of the clock in each micro-batch.

    Spark looks at timers in a micro-batch only. After a start it begins the first one when there is something to read:
    without a clock, waiting messages would be delivered only once another one is scheduled.
    """
    clock = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", "1").option("numPartitions", "1")
    return clock.load().selectExpr("0 AS shard", f"CAST({CLOCK} AS LONG) AS bucket", "CAST('' AS BINARY) AS frames")


def kafka_source(progress: Any) -> Any:
    """Return the part of the progress of a query that is about the topics."""
    return next(source for source in progress["sources"] if "Kafka" in source["description"])


@contextmanager
def _copied_for_driver(hidden: Mapping[str, str]) -> Iterator[None]:
    """Let the driver find a file that was sent to executors: it reads offsets, from its own working directory."""
    named = next((value for value in hidden.values() if value.startswith(_FILE)), None)
    path = None if named is None else Path(named.removeprefix(_FILE).rpartition(":")[0])
    if path is None or path.is_absolute():
        yield
        return
    try:
        path.touch(mode=0o600)
        shutil.copyfile(SparkFiles.get(path.name), path)
    except OSError as error:
        raise ConfigurationError(
            f"the driver cannot write the login of the connection to its working directory {Path.cwd()}"
            f" ({error.strerror}); start it in a folder that it may write to"
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
