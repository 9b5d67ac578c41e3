"""The stages of the query that run in Python on executors: reading records, and writing the frames of a shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.spark.streaming.frames import Frame, Kind, pack, unpack
from airflow_delay_provider.spark.streaming.intake import Intake
from airflow_delay_provider.spark.streaming.routing import CLOCK
from airflow_delay_provider.spark.streaming.sink import ShardWriter

#: What a task of the sink returns for each shard: counts as JSON, and what was read.
SUMMARY = "shard int, counts string, seen binary"
#: Most latenesses that a task returns.
MOST_SAMPLES = 2000
#: The columns of Spark's Kafka source that the first stage reads.
COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
_FRAMES = pa.schema([("shard", pa.int32()), ("bucket", pa.int64()), ("frames", pa.binary())])
_SUMMARY = pa.schema([("shard", pa.int32()), ("counts", pa.string()), ("seen", pa.binary())])
#: The writers of this process, whose clients stay connected from one micro-batch to the next.
_WRITERS: dict[tuple[str, int], ShardWriter] = {}
Batches = Iterator[pa.RecordBatch]


def make_intake(intake: Intake) -> Callable[[Batches], Batches]:
    """Return the first stage."""

    def read_records(batches: Batches) -> Batches:
        for batch in batches:
            if batch.num_rows:
                yield _read(intake, batch)

    return read_records


def make_sink(config: KafkaConfig, service_id: str, number: int) -> Callable[[Batches], Batches]:
    """Return the last stage for one micro-batch; its input is sorted by shard."""

    def write_frames(batches: Batches) -> Batches:
        for shard, rows in groupby(_rows(batches), key=itemgetter(0)):
            seen: list[Frame] = []
            writer = _WRITERS.get((service_id, shard))
            if writer is None:
                writer = _WRITERS[service_id, shard] = ShardWriter(config, service_id, shard)
            written = writer.write(_split(rows, seen), number)
            counts: dict[str, Any] = vars(written)
            late = counts["lateness_ms"] = written.lateness_ms[:: max(1, len(written.lateness_ms) // MOST_SAMPLES)]
            if written.lateness_ms:
                late.append(max(written.lateness_ms))
            summary = [[shard], [json.dumps(counts)], [pack(seen)]]
            yield pa.record_batch(
                [pa.array(each, field.type) for each, field in zip(summary, _SUMMARY, strict=True)], schema=_SUMMARY
            )

    return write_frames


def _read(intake: Intake, batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [batch.column(name).to_pylist() for name in COLUMNS[:3]]
    times = batch.column("timestamp").cast(pa.timestamp("ms"), safe=False).cast(pa.int64()).to_pylist()
    columns += [times, *(batch.column(name).to_pylist() for name in COLUMNS[4:])]
    records = (
        (topic, partition, Record(offset, time_ms, key, value, _headers(headers)))
        for topic, partition, offset, time_ms, key, value, headers in zip(*columns, strict=True)
    )
    found = intake.read(records)
    return pa.record_batch(
        [
            pa.array([shard for shard, _ in found], pa.int32()),
            pa.array([bucket for _, bucket in found], pa.int64()),
            pa.array([pack(frames) for frames in found.values()], pa.binary()),
        ],
        schema=_FRAMES,
    )


def _headers(headers: list[dict[str, Any]] | None) -> list[tuple[str, bytes]] | None:
    return [(each["key"], each["value"]) for each in headers] if headers else None


def _rows(batches: Batches) -> Iterator[tuple[int, int, bytes]]:
    for batch in batches:
        yield from zip(
            batch.column("shard").to_pylist(),
            batch.column("bucket").to_pylist(),
            batch.column("frames").to_pylist(),
            strict=True,
        )


def _split(rows: Iterator[tuple[int, int, bytes]], seen: list[Frame]) -> Iterator[Frame]:
    """Return the frames to write, and keep the others."""
    for _, bucket, packed in rows:
        if bucket == CLOCK:
            seen.extend(frame for frame in unpack(packed) if frame.kind in (Kind.SEEN, Kind.CLOCK))
        else:
            yield from unpack(packed)
