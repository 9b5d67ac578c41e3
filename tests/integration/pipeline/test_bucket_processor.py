"""The stateful part of the dispatcher in a query of its own."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.streaming.frames import Frame, Kind, pack, unpack
from airflow_delay_provider.spark.streaming.processor import INPUT, OUTPUT, PIECE_BYTES, BucketProcessor
from airflow_delay_provider.spark.streaming.routing import Routing
from airflow_delay_provider.spark.streaming.service import SETTINGS
from airflow_delay_provider.spark.streaming.source import read_clock
from tools.servers.component import wait_for

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]
ROUTING = Routing(shards=2, bucket_ms=500)
RELEASE_BYTES = 500_000
#: Two buckets that have ended long ago, the later one first.
BUCKETS = (21, 20)
SIZE = 300_000
MANY = 40


def accepted(number: int, due_ms: int) -> Frame:
    due = datetime.fromtimestamp(due_ms / 1000, UTC)
    message = Message(id=f"m{number}", channel="c", payload=b"x" * SIZE, deliver_at=due)
    key = wire.encode_key(due_ms, message.id)
    return Frame(Kind.ACCEPTED, "inbox", 0, number, due_ms, key, wire.encode_envelope(message, now_ms=1))


class Query:
    """A query whose micro-batches are kept."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.batches: dict[int, list[Frame]] = defaultdict(list)

    def start(self) -> StreamingQuery:
        for name, value in SETTINGS.items():
            self.spark.conf.set(name, value)
        frames = self.spark.readStream.schema(INPUT).parquet(str(self.folder / "input"))
        due = (
            frames.unionByName(read_clock(self.spark))
            .groupBy("shard", "bucket")
            .transformWithState(
                statefulProcessor=BucketProcessor(Topology(name="t"), ROUTING, RELEASE_BYTES),
                outputStructType=OUTPUT,
                outputMode="Update",
                timeMode="ProcessingTime",
            )
        )
        writer = due.writeStream.outputMode("update").foreachBatch(self._keep)
        return (
            writer.option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(processingTime="200 milliseconds")
            .start()
        )

    def of_kind(self, kind: Kind) -> dict[int, list[Frame]]:
        found = {number: [frame for frame in frames if frame.kind is kind] for number, frames in self.batches.items()}
        return {number: frames for number, frames in sorted(found.items()) if frames}

    def _keep(self, frames: DataFrame, number: int) -> None:
        rows = frames.sort("shard", "bucket", "turn").collect()
        # A micro-batch that is repeated replaces the first attempt, as in Kafka.
        self.batches[number] = [frame for row in rows for frame in unpack(bytes(row.frames))]


def test_buckets_larger_than_the_bound_leave_in_several_micro_batches_each_message_once_also_after_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    messages = [accepted(number, BUCKETS[number % 2] * 500 - number % 7) for number in range(MANY)]
    rows = [(0, bucket, pack(messages[part::2])) for part, bucket in enumerate(BUCKETS)]
    spark.createDataFrame(rows, INPUT).coalesce(1).write.parquet(str(tmp_path / "input"))
    query = Query(spark, tmp_path)
    running = query.start()
    try:
        wait_for(lambda: query.of_kind(Kind.DELIVER), what="the first messages leave", seconds=120)
        running.stop()
        assert sum(len(frames) for frames in query.of_kind(Kind.DELIVER).values()) < MANY
        running = query.start()
        delivered = wait_for(
            lambda: (found := query.of_kind(Kind.DELIVER), sum(map(len, found.values())) >= MANY)[1] and found,
            what="all messages leave",
            seconds=120,
        )
        wait_for(lambda: max(query.batches) > max(delivered), what="another micro-batch", seconds=60)
    finally:
        running.stop()
    assert sorted(frame.offset for frames in delivered.values() for frame in frames) == list(range(MANY))
    assert len(delivered) > 2
    assert min(delivered) == min(query.of_kind(Kind.ENTRY)), "they begin to leave in the micro-batch that reads them"
    # Each task may exceed it by one piece.
    most = ROUTING.shards * (RELEASE_BYTES + PIECE_BYTES)
    assert max(sum(len(frame.value or b"") for frame in frames) for frames in delivered.values()) < most
    for frames in delivered.values():
        for bucket in range(2):
            due = [frame.moment_ms for frame in frames if frame.offset % 2 == bucket]
            assert due == sorted(due)
    # Until a bucket is empty, the driver learns that it is not, and keeps its records.
    last = max(delivered)
    for number, clocks in query.of_kind(Kind.CLOCK).items():
        remains = min(delivered) <= number < last
        assert (min(clock.moment_ms for clock in clocks) <= max(BUCKETS) * 500) is remains
