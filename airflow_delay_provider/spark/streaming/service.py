"""The streaming query of a ladder, and what the driver does after each micro-batch."""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from airflow_delay_provider.brokers.kafka import verify
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch.assignment import Trimmer
from airflow_delay_provider.brokers.kafka.progress import service_of
from airflow_delay_provider.brokers.kafka.reader import Reader
from airflow_delay_provider.domain.exceptions import ConfigurationError, DelayError
from airflow_delay_provider.spark.streaming.checkpoint import CheckpointFiles
from airflow_delay_provider.spark.streaming.frames import Kind, unpack
from airflow_delay_provider.spark.streaming.intake import Intake
from airflow_delay_provider.spark.streaming.membership import Membership
from airflow_delay_provider.spark.streaming.processor import INPUT, OUTPUT, BucketProcessor
from airflow_delay_provider.spark.streaming.routing import Routing
from airflow_delay_provider.spark.streaming.source import kafka_source, read_clock, source_options
from airflow_delay_provider.spark.streaming.stages import COLUMNS, SUMMARY, make_intake, make_sink
from airflow_delay_provider.spark.streaming.takeover import Start, Takeover
from airflow_delay_provider.spark.streaming.watermarks import PartitionId, Watermarks

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 5.0
#: How often the progress is committed although it has not changed: a broker forgets it after a while.
RENEW_SECONDS = 3600.0
COMMIT_SECONDS = 2.0
SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Each micro-batch stores what has changed, and now and then the whole state.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Both bound what Spark and Python exchange at once, which would be thousands of rows however large.
    "spark.sql.execution.arrow.maxBytesPerBatch": "16000000",
    "spark.sql.execution.arrow.transformWithStateInPySpark.maxStateRecordsPerBatch": "16",
}


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How a ladder is served."""

    checkpoint: str
    routing: Routing
    trigger_seconds: float = 1.0
    max_records: int = 50_000


class QueryEndedError(Exception):
    """The query has done what it was asked for."""


class DispatchService:
    """Serves one ladder until it is stopped."""

    def __init__(self, spark: SparkSession, config: KafkaConfig, options: ServiceOptions) -> None:
        self._spark = spark
        self._config = config
        self._options = options
        self._clients = KafkaClients(config)
        topics = verify.complete(self._clients)
        verify.require_permitted(self._clients, config.topology)
        self.files = CheckpointFiles(spark, options.checkpoint)
        self.membership = Membership(self._clients, topics)
        self.takeover = Takeover(self._clients, self.files, self.membership, dict(topics))
        self._open_files = ExitStack()
        self._trimmer = Trimmer(self._clients)
        self._figures = Figures()
        self._watermarks = Watermarks()
        #: All messages that were due before it have left with the micro-batch before, which is committed when the next
        #: one begins.
        self._time_ms = 0
        self._done: dict[PartitionId, int] = {}
        self._committed_at = time.monotonic()
        self._changed: dict[PartitionId, int] = {}
        #: How many micro-batches are left, and the first one that was not begun.
        self._left: int | None = None
        self.ended_before: int | None = None

    def open(self, *, to_release: bool = False) -> Start:
        """Join the dispatchers and claim the ladder."""
        self.takeover.open(self._options.routing)
        if self.files.read("released") is not None and not to_release:
            raise ConfigurationError(
                f"--checkpoint: the ladder was given back from {self._options.checkpoint} at least in part; finish that"
                " with --release, then name an empty folder"
            )
        self.membership.join()
        start = self.takeover.claim()
        known = self.files.read("watermarks")
        if known is not None:
            self._watermarks = Watermarks.from_json(known)
        return start

    def is_given_back(self) -> bool:
        """Whether the progress in Kafka names no service any more."""
        reader = Reader(self._clients, group=self._config.topology.dispatch_group)
        try:
            return not any(map(service_of, reader.committed(self.membership.partitions, seconds=60.0)))
        finally:
            reader.close()

    def start_query(self, start: Start, *, ends_after: int | None = None) -> StreamingQuery:
        """Start the query; it continues from its checkpoint, if there is one.

        :param ends_after: end after so many micro-batches, before anything of the next one is written. A micro-batch
            that was not complete when the job was killed is completed by the first one.
        """
        self._left = ends_after
        options = self._options
        for name, value in SETTINGS.items():
            self._spark.conf.set(name, value)
        self._spark.conf.set("spark.sql.shuffle.partitions", str(options.routing.shards))
        topology = self._config.topology
        source = self._open_files.enter_context(
            source_options(self._spark.sparkContext, self._config, self.membership.partitions, start.offsets)
        )
        records = self._spark.readStream.format("kafka").options(**source)
        intake = Intake(topology=topology, routing=options.routing, begun=start.begun)
        frames = (
            records.option("maxOffsetsPerTrigger", str(options.max_records))
            .load()
            .select(*COLUMNS)
            .mapInArrow(make_intake(intake), INPUT)
            .unionByName(read_clock(self._spark))
        )
        due = frames.groupBy("shard", "bucket").transformWithState(
            statefulProcessor=BucketProcessor(topology, options.routing),
            outputStructType=OUTPUT,
            outputMode="Update",
            timeMode="ProcessingTime",
        )
        writer = (
            due.writeStream.outputMode("update")
            .queryName(f"dispatch {topology.prefix}")
            .foreachBatch(self._write)
            .option("checkpointLocation", options.checkpoint)
        )
        return writer.trigger(processingTime=f"{round(options.trigger_seconds * 1000)} milliseconds").start()

    def close(self) -> None:
        """Leave the group."""
        self.membership.close()
        self._open_files.close()
        self._clients.close()

    # -- after each micro-batch ----------------------------------------------------------------------------------

    def _write(self, frames: DataFrame, number: int) -> None:
        """Write the output of a micro-batch. The one before it is committed now."""
        self.membership.require()
        if self._left is not None:
            if not self._left:
                self.ended_before = number
                raise QueryEndedError(f"the query has ended before micro-batch {number}")
            self._left -= 1
        self._commit_progress()
        shards = self._options.routing.shards
        rows = (
            frames.repartitionById(shards, "shard")
            .sortWithinPartitions("shard", "bucket", "turn")
            .mapInArrow(make_sink(self._config, self.takeover.service_id, number), SUMMARY)
            .collect()
        )
        read_any, times_ms = False, list[int]()
        for row in rows:
            self._figures.add(json.loads(row.counts))
            for frame in unpack(bytes(row.seen)):
                if frame.kind is Kind.CLOCK:
                    times_ms.append(frame.moment_ms)
                else:
                    read_any = True
                    self._watermarks.add((frame.topic, frame.partition), frame.offset, frame.moment_ms)
        self._time_ms = min(times_ms, default=0)
        if read_any:
            self.files.write("watermarks", self._watermarks.to_json())

    def _commit_progress(self) -> None:
        """Commit the records before which no message waits, and let the broker delete them.

        The state of the micro-batch before is committed, so all messages that were due before that time have left it.
        """
        for topic, partition, offset in self._watermarks.at(self._time_ms - 1):
            if self._done.get((topic, partition), -1) < offset:
                self._done[topic, partition] = self._changed[topic, partition] = offset
        waited = time.monotonic() - self._committed_at
        if (self._changed and waited > COMMIT_SECONDS) or waited > RENEW_SECONDS:
            self._committed_at = time.monotonic()
            try:
                self.membership.commit(
                    (*where, offset, self.takeover.note(where[0])) for where, offset in self._done.items()
                )
            except DelayError as error:
                # Dispatching does not depend on it, and the membership is checked for each micro-batch.
                log.warning("The progress is committed later: %s", error)
                return
            self._trimmer.note((*where, offset) for where, offset in self._changed.items())
            self._changed.clear()
        self._trimmer.trim()

    def describe_progress(self, query: StreamingQuery) -> str:
        """Return one line about what was done since the last call."""
        return self._figures.describe(query.lastProgress)


class Figures:
    """What was done since the last progress line."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counts: dict[str, int] = {}
        self._lateness_ms: list[int] = []

    def add(self, counts: dict[str, Any]) -> None:
        """Add the counts of one shard."""
        self._lateness_ms += counts.pop("lateness_ms")
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def describe(self, progress: Any) -> str:
        """Return one line, and start again."""
        counts, self._counts = self._counts, {}
        late, self._lateness_ms = sorted(self._lateness_ms), []
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        parts = [f"{name.replace('_', ' ')} {count}" for name, count in counts.items() if count]
        if late:
            parts.append(f"late p50 {late[len(late) // 2]} ms, p99 {late[len(late) * 99 // 100]} ms, max {late[-1]} ms")
        if progress is not None:
            source, operators = kafka_source(progress), progress["stateOperators"]
            parts.append(f"behind {(source['metrics'] or {}).get('maxOffsetsBehindLatest', '?')} records")
            parts.append(f"waiting in {operators[0]['numRowsTotal'] if operators else 0} state rows")
            parts.append(f"micro-batch {progress['batchId']} took {progress['durationMs'].get('triggerExecution')} ms")
        return f"{seconds:.0f} s: " + ", ".join(parts)
