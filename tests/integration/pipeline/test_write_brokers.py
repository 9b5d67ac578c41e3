"""Rows of a DataFrame arrive on every broker, with every column, and once if the broker knows ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.domain.message import Message
from tests.integration.pipeline.targets import BROKERS, KNOWS_IDS, Target, serving
from tests.kafkas import dispatching

PAST = datetime(2020, 2, 29, 12, 30, 0, 123_456, tzinfo=UTC)
EVERY_COLUMN = (
    "id string, channel string, payload binary, deliver_at timestamp, key string, headers map<string,string>,"
    " content_type string, priority int"
)


@pytest.fixture(params=BROKERS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    with serving(request.param, tmp_path, request) as target:
        yield target


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "reports" / "report.json"


def due_rows(spark: SparkSession, n: int, partitions: int = 4) -> DataFrame:
    """Rows of a time that has passed, so that their messages go straight to the channel."""
    return spark.range(0, n, 1, partitions).select(
        sf.format_string("payload %d", "id").alias("payload"), sf.lit(PAST).alias("deliver_at")
    )


def test_every_column_arrives(spark: SparkSession, target: Target, report: Path):
    """M10"""
    payload = bytes(range(256))
    rows = [
        ("order-1", target.channel, payload, PAST, "customer-7", {"trace": "ä", "empty": ""}, "application/json", 9),
        ("order-2", None, b"", PAST, None, None, None, None),
    ]
    target.write(spark.createDataFrame(rows, EVERY_COLUMN), report=str(report))
    received = {message.id: message for message in target.received(2)}
    assert received == {
        "order-1": Message(
            id="order-1",
            channel=target.channel,
            payload=payload,
            # A time that has passed is rounded down.
            deliver_at=PAST.replace(microsecond=123_000),
            key="customer-7",
            headers={"trace": "ä", "empty": ""},
            content_type="application/json",
            priority=9,
        ),
        "order-2": Message(
            id="order-2", channel=target.channel, payload=b"", deliver_at=PAST.replace(microsecond=123_000)
        ),
    }
    assert json.loads(report.read_text())["outcomes"] == {"scheduled": 0, "dispatched": 2, "kept": 0, "replaced": 0}


def test_delayed_rows_wait_and_arrive_with_their_time_to_the_millisecond(
    spark: SparkSession, target: Target, report: Path
):
    waits = timedelta(days=1) if target.broker in KNOWS_IDS else timedelta(seconds=10)
    due = datetime.now(UTC) + waits
    rows = spark.range(20).select(
        sf.col("id").cast("string").alias("id"), sf.lit("p").alias("payload"), sf.lit(due).alias("deliver_at")
    )
    target.write(rows, report=str(report))
    if target.broker in KNOWS_IDS:
        assert json.loads(report.read_text())["outcomes"]["scheduled"] == 20
        assert sorted(target.scheduled_ids(), key=int) == [str(n) for n in range(20)]
        return
    with ExitStack() as stack:
        broker = stack.enter_context(target.open())
        if isinstance(broker, KafkaBroker):
            stack.enter_context(dispatching(broker))
        received = target.received(20)
    assert sorted(int(message.id) for message in received) == list(range(20))
    up = timedelta(milliseconds=1)
    assert {message.deliver_at for message in received} == {
        due.replace(microsecond=due.microsecond // 1000 * 1000) + up
    }
    assert datetime.now(UTC) >= due


def test_a_rerun_of_the_job_carries_the_same_ids(spark: SparkSession, target: Target, report: Path):
    target.write(due_rows(spark, 300, partitions=4), report=str(report))
    first = {message.id: message.payload for message in target.received(300)}
    again = due_rows(spark, 300, partitions=3).select("deliver_at", "payload")
    target.write(again, report=str(report))
    counts = json.loads(report.read_text())["outcomes"]
    assert len(first) == 300
    if target.broker in KNOWS_IDS:
        assert counts == {"scheduled": 0, "dispatched": 0, "kept": 300, "replaced": 0}
        assert target.received(0) == []
    else:
        assert counts["dispatched"] == 300
        assert {message.id: message.payload for message in target.received(300)} == first


@pytest.mark.parametrize("broker", ["rabbitmq", "kafka"])
def test_messages_of_any_broker_can_wait_in_the_ledger(
    spark: SparkSession, broker: str, tmp_path: Path, request: pytest.FixtureRequest
):
    with serving(broker, tmp_path, request, hold="ledger") as target:
        later = due_rows(spark, 50).withColumn("deliver_at", sf.lit(datetime(2035, 1, 1, tzinfo=UTC)))
        target.write(later)
        target.write(later)
        assert Counter(target.scheduled_ids()).most_common(1)[0][1] == 1
        assert len(target.scheduled_ids()) == 50
        target.write(due_rows(spark, 30))
        assert len({message.id for message in target.received(30)}) == 30


def test_times_of_any_session_zone_are_the_same_instants(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
):
    with serving("sqlite", tmp_path, request) as target:
        for zone in ("America/St_Johns", "Asia/Kathmandu"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            try:
                rows = spark.sql(
                    "SELECT 'p' AS payload, TIMESTAMP '2021-03-04 05:06:07.089 Europe/Berlin' AS deliver_at"
                )
                target.write(rows, idPrefix=zone)
            finally:
                spark.conf.set("spark.sql.session.timeZone", "UTC")
        assert {message.deliver_at for message in target.received(2)} == {
            datetime(2021, 3, 4, 4, 6, 7, 89_000, tzinfo=UTC)
        }


@pytest.mark.parametrize(
    "columns", ["CAST(1.5 AS DOUBLE)", "INTERVAL '0 00:00:01.5' DAY TO SECOND", "CAST(1.5 AS DECIMAL(5,2))"]
)
def test_delays_are_seconds_or_intervals(
    spark: SparkSession, columns: str, tmp_path: Path, request: pytest.FixtureRequest
):
    with serving("sqlite", tmp_path, request) as target:
        began = datetime.now(UTC)
        target.write(spark.sql(f"SELECT 'p' AS payload, -({columns}) AS deliver_after"))
        [message] = target.received(1)
        late = timedelta(seconds=1.501)
        assert began - late <= message.deliver_at <= datetime.now(UTC) - timedelta(seconds=1.5)


def test_large_payloads_are_scheduled_in_bounded_batches(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
):
    with serving("postgresql", tmp_path, request) as target:
        rows = spark.range(0, 60, 1, 1).select(
            sf.repeat(sf.col("id").cast("string"), 500_000).alias("payload"), sf.lit(PAST).alias("deliver_at")
        )
        target.write(rows)
        assert len({message.payload for message in target.received(60)}) == 60


def test_equal_rows_are_one_message_and_empty_partitions_are_none(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest, report: Path
):
    with serving("postgresql", tmp_path, request) as target:
        rows = due_rows(spark, 3, partitions=6)
        target.write(rows.union(rows).repartition(3), report=str(report))
        counts = json.loads(report.read_text())
        assert (counts["rows"], counts["outcomes"]["dispatched"], counts["outcomes"]["kept"]) == (6, 3, 3)
        assert len(target.received(3)) == 3


def test_the_package_is_found_by_its_name_and_tasks_do_not_need_airflow():
    """Executors import this: without Airflow it still works."""
    code = """
import sys
sys.modules["airflow"] = None
import pyspark_delay, airflow_delay_provider.spark.datasource.writer
from airflow_delay_provider.spark.connection import JobConnection
with JobConnection(conn_id="x", conn_type="delay", extra_dejson={"ledger_url": "sqlite://"}).open() as broker:
    print(pyspark_delay.DefaultSource.name(), broker.check())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("delay ledger at sqlite://"), done.stderr
