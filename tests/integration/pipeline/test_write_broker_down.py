"""A broker that goes down in the middle of a job: the job fails with a sentence, and running it again completes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pika
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from airflow_delay_provider.brokers.port import HasTopology
from airflow_delay_provider.spark.jobs.bulk_schedule import main
from airflow_delay_provider.spark.jobs.command import ExitCode
from tests import rabbits
from tests.integration.pipeline.targets import CONN_ID, target_of
from tools.servers.component import wait_for

pytestmark = pytest.mark.timeout(600)

ROWS = 1200
BATCH = 100
#: Batches that the job may schedule before the broker goes down.
BEFORE = 6
SECONDS = 120


@pytest.fixture
def _small_batches(spark: SparkSession) -> Iterator[None]:
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(BATCH))
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def count_messages(url: str, queue: str) -> int:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
@pytest.mark.usefixtures("_small_batches")
def test_a_job_whose_broker_goes_down_fails_with_a_sentence_and_is_completed_by_another_run(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    down = tmp_path / "down"

    def wait_for_the_fault(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            deadline = time.monotonic() + SECONDS
            while number == BEFORE and not down.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError("the broker is not down")
                time.sleep(0.1)
            yield batch

    rows = spark.range(0, ROWS, 1, 1).select(
        # So long that each batch is sent at once.
        sf.concat(sf.col("id").cast("string"), sf.lit(" "), sf.repeat(sf.lit("x"), 1000)).alias("payload"),
        sf.lit("2020-01-01T00:00:00Z").alias("deliver_at"),
    )
    rows.mapInArrow(wait_for_the_fault, rows.schema).createOrReplaceTempView("rows_of_a_lost_broker")

    with rabbits.private_node(tmp_path / "rabbitmq") as node:
        rabbits.declare_queue(node.url, "orders", **{"x-queue-type": "quorum"})
        target = target_of("rabbitmq", tmp_path, rabbits.connection_of(node.url, tick=0.1), "orders")
        with target.open() as broker:
            assert isinstance(broker, HasTopology)
            broker.require_topology()

        def kill_in_the_middle() -> None:
            wait_for(lambda: count_messages(node.url, "orders") >= BATCH, what="a batch is there", seconds=SECONDS)
            node.kill()
            down.touch()

        arguments = ["--table", "rows_of_a_lost_broker", "--channel", "orders", "--batch-size", str(BATCH)]
        arguments += ["--connection", CONN_ID, "--connection-file", target.options["connectionFile"]]
        with ThreadPoolExecutor(1) as pool:
            killed = pool.submit(kill_in_the_middle)
            code = main(arguments)
            killed.result()
        last = capfd.readouterr().err.splitlines()[-1]
        assert code == ExitCode.FAILED, last
        assert last.startswith("bulk_schedule: failed: ")
        assert f"127.0.0.1:{node.port}" in last

        node.start_again()
        assert main(arguments) == ExitCode.OK
        received = target.received(ROWS)
    found = {int(message.payload.split()[0]): message.id for message in received}
    assert found.keys() == set(range(ROWS))
    # What the first run had scheduled is there twice, with one id.
    assert len({message.id for message in received}) == ROWS
    assert ROWS + BATCH <= len(received) <= ROWS + BEFORE * BATCH
