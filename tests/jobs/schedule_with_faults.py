"""Schedules rows while tasks fail: ``schedule_with_faults.py PLAN``, a JSON list of writes.

Each write has a ``name``, which its Spark jobs have as description, ``options`` of the data source, ``rows``,
``partitions``, and a ``fault`` that its first task meets once the broker has confirmed some of its messages: ``raise``
fails it, ``kill`` kills its executor, and ``slow`` makes it wait until Spark has run a copy of it. ``confirmed`` says
where to see that: the URL of a ledger, a Kafka topic with its bootstrap server, or a RabbitMQ queue with its URL. All
other tasks wait for the file ``met``, so that what is confirmed by then is of the first one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

BATCH = 100
#: Batches before the fault: Spark holds some of them back until it has the next one.
BEFORE = 6
SECONDS = 120


def count_confirmed(place: dict[str, str]) -> int:
    """Return how many messages the broker has."""
    match place["broker"]:
        case "postgresql":
            from sqlalchemy import create_engine, text

            with create_engine(place["url"]).connect() as connection:
                return int(connection.execute(text("SELECT count(*) FROM delay_scheduled_message")).scalar_one())
        case "kafka":
            from confluent_kafka import Consumer, TopicPartition

            with Consumer({"bootstrap.servers": place["url"], "group.id": "count"}) as consumer:
                return int(consumer.get_watermark_offsets(TopicPartition(place["channel"], 0))[1])
    import pika

    with pika.BlockingConnection(pika.URLParameters(place["url"])) as connection:
        return int(connection.channel().queue_declare(place["channel"], passive=True).method.message_count)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {SECONDS} s")
        time.sleep(0.1)


def meet_fault(write: dict[str, Any]) -> None:
    wait_until(lambda: count_confirmed(write["confirmed"]) >= BATCH, "the broker has confirmed a batch")
    Path(write["met"]).touch()
    match write["fault"]:
        case "raise":
            raise ValueError("the source is broken for a moment")
        case "kill":
            worker = psutil.Process()
            executor = next(each for each in worker.parents() if "java" in each.name())
            os.kill(executor.pid, signal.SIGKILL)
    # Spark ends this process: its executor is gone, or the copy of its task has ended.
    time.sleep(SECONDS)


def with_fault(write: dict[str, Any]) -> Any:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        fails = context.partitionId() == 0 and context.attemptNumber() == 0
        if not fails:
            wait_until(Path(write["met"]).exists, "the first task has met its fault")
        for number, batch in enumerate(batches):
            if fails and number == BEFORE:
                meet_fault(write)
            yield batch

    return read


def try_airflow(_: int) -> str:
    try:
        import airflow
    except ImportError as error:
        return str(error)
    return str(airflow.__file__)


spark = SparkSession.builder.getOrCreate()
print("on executors:", spark.sparkContext.parallelize([0], 1).map(try_airflow).collect())
for write in json.loads(Path(sys.argv[1]).read_text()):
    rows = spark.range(0, write["rows"], 1, write["partitions"]).select(
        # So long that each batch is sent at once.
        sf.concat(sf.col("id").cast("string"), sf.lit(" "), sf.repeat(sf.lit("x"), 1000)).alias("payload"),
        sf.lit("2020-01-01T00:00:00Z").alias("deliver_at"),
    )
    rows = rows.mapInArrow(with_fault(write), "payload string, deliver_at string")
    spark.sparkContext.setJobDescription(write["name"])
    rows.write.format("delay").mode("append").options(**write["options"]).save()
    print("written:", write["name"])
spark.stop()
