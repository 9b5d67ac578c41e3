"""Giving a ladder back: every message that waits in the state is written to the topics of the ladder."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.domain.clock import SystemClock, floor_ms
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.spark.streaming.frames import unpack
from airflow_delay_provider.spark.streaming.processor import STATE_NAME, to_rung
from airflow_delay_provider.spark.streaming.service import DispatchService, ServiceOptions
from airflow_delay_provider.spark.streaming.sink import ShardWriter
from airflow_delay_provider.spark.streaming.source import kafka_source
from airflow_delay_provider.spark.streaming.stages import Batches
from airflow_delay_provider.spark.streaming.takeover import Start

log = logging.getLogger(__name__)


def release(spark: SparkSession, config: KafkaConfig, service: DispatchService, options: ServiceOptions) -> None:
    """End the service of a ladder.

    Every step can be repeated after a crash: the query ends first and is not run again; the writers of each shard know
    how many of its messages are written; and only then the progress moves behind everything that was read, in one
    commit, without the name of this service.
    """
    ends = service.files.read("released")
    if ends is not None and service.is_given_back():
        log.info("The ladder %s was released before", config.topology.prefix)
        return
    start = service.open(to_release=True)
    if ends is None:
        ends = _end_query(service, start)
        service.files.write("released", ends)
    count = _write_back(spark, config, service.takeover.service_id, options)
    service.takeover.give_back(
        {(topic, int(number)): offset for topic, each in ends.items() for number, offset in each.items()}
    )
    log.info("Released the ladder %s with %d waiting messages", config.topology.prefix, count)


def _end_query(service: DispatchService, start: Start) -> Any:
    """Complete the micro-batch that may be incomplete, and return up to where records were read."""
    query = service.start_query(start, ends_after=1)
    try:
        query.awaitTermination()
    except StreamingQueryException:
        if service.ended_before is None:
            raise
    for progress in reversed(query.recentProgress):
        if progress["batchId"] + 1 == service.ended_before:
            return json.loads(kafka_source(progress)["endOffset"])
    raise BrokerError("the query ended without telling what it has read; run --release again")


def _write_back(spark: SparkSession, config: KafkaConfig, service_id: str, options: ServiceOptions) -> int:
    state = (
        spark.read.format("statestore")
        .option("path", options.checkpoint)
        .option("stateVarName", STATE_NAME)
        .load()
        .selectExpr(
            "key.shard AS shard",
            "key.bucket AS bucket",
            "user_map_key.piece AS piece",
            "user_map_value.frames AS frames",
        )
    )
    rows = (
        state.repartitionById(options.routing.shards, "shard")
        .sortWithinPartitions("shard", "bucket", "piece")
        .mapInArrow(_make_writer(config, service_id), "count long")
        .collect()
    )
    return sum(row["count"] for row in rows)


def _make_writer(config: KafkaConfig, service_id: str) -> Any:
    def write_back(batches: Batches) -> Batches:
        from itertools import groupby
        from operator import itemgetter

        import pyarrow as pa

        for shard, rows in groupby(_rows(batches), key=itemgetter(0)):
            writer = ShardWriter(config, f"{service_id}/released", shard)
            now_ms = floor_ms(SystemClock().now())
            frames = (
                to_rung(config.topology, frame.partition, frame.key or b"", frame.value or b"", now_ms)
                for _, packed in rows
                for frame in unpack(packed)
            )
            written = writer.write(frames, 0)
            writer.close()
            yield pa.record_batch([pa.array([written.moved], pa.int64())], names=["count"])

    return write_back


def _rows(batches: Batches) -> Iterator[tuple[int, bytes]]:
    for batch in batches:
        yield from zip(batch.column("shard").to_pylist(), batch.column("frames").to_pylist(), strict=True)
