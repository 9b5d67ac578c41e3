"""Writes rows to the inbox of a Kafka ladder; their task fails once Kafka has some of them, and Spark runs it again.

``write_to_inbox_with_fault.py CONNECTIONS CHANNEL BOOTSTRAP INBOX ROWS``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from pyspark import TaskContext
from pyspark.sql import SparkSession

from airflow_delay_provider.spark.kafka_sink import write_to_inbox

SENT = 100
SECONDS = 120

connection_file, channel, bootstrap, inbox, count = sys.argv[1:]


def count_sent() -> int:
    # In the worker: these classes cannot travel to it.
    from confluent_kafka import Consumer, TopicPartition

    with Consumer({"bootstrap.servers": bootstrap, "group.id": "count"}) as consumer:
        partitions = consumer.list_topics(inbox, timeout=30).topics[inbox].partitions
        return sum(int(consumer.get_watermark_offsets(TopicPartition(inbox, each))[1]) for each in partitions)


already_there = count_sent()


def read(numbers: Iterator[int]) -> Iterator[tuple[str, str]]:
    # So long that they are sent before the last one is there.
    yield from ((f"{number} {'x' * 1000}", "2030-01-31T17:00:00Z") for number in numbers)
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0:
        deadline = time.monotonic() + SECONDS
        while count_sent() < already_there + SENT:
            if time.monotonic() > deadline:
                raise TimeoutError("nothing was sent")
            time.sleep(0.1)
        raise ValueError("the source is broken for a moment")


spark = SparkSession.builder.getOrCreate()
numbers = spark.sparkContext.parallelize(range(int(count)), 1)
rows = spark.createDataFrame(numbers.mapPartitions(read), "payload string, deliver_at string")
print(f"report: {write_to_inbox(rows, 'stream', connection_file=connection_file, channel=channel)}")
spark.stop()
