"""``spark.read.format("delay")``: messages of ledgers as DataFrames."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual
from pyspark.sql.functions import col, lit

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.exceptions import ConfigurationError, LedgerError
from airflow_delay_provider.domain.message import Message, Origin
from tests.integration.pipeline.reading import NAME, make_reader, read_rows, write_connection

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
START = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


class At:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.moment = START

    def now(self) -> datetime:
        return self.moment


@pytest.fixture
def filled(ledger: Ledger, tmp_path: Path) -> dict[str, str]:
    """Thirty messages: a third is dispatched, late by half a second, one is cancelled, the others wait."""
    clock = At()
    broker = EmbeddedBroker(ledger, clock=clock)
    messages = [
        Message(
            id=f"m{number:02}",
            channel=f"channel.{number % 3}",
            payload=bytes([number]),
            deliver_at=START + timedelta(seconds=1 if number < 10 else 3600 + number),
            key="k" if number % 2 else None,
            headers={"number": str(number)},
            priority=number % 3,
            origin=Origin(dag_id="d", run_id="r", task_id="t", map_index=number) if number == 3 else None,
        )
        for number in range(30)
    ]
    broker.schedule(messages[10:])
    broker.cancel(["m29"])
    clock.moment = START + timedelta(seconds=1, milliseconds=500)
    broker.schedule(messages[:10])
    url = ledger.url.render_as_string(hide_password=False)
    return {"connection": NAME, "connectionFile": write_connection(tmp_path, url)}


@pytest.fixture(params=["false", "true"], ids=["spark filters", "pushed down"])
def session(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The session, with and without the setting that pushes filters down."""
    spark.conf.set(PUSHDOWN, request.param)
    yield spark
    spark.conf.unset(PUSHDOWN)


def load(spark: SparkSession, options: dict[str, str], **more: str) -> DataFrame:
    return spark.read.format("delay").options(**options, **more).load()


def plan_of(frame: DataFrame) -> str:
    return frame._jdf.queryExecution().optimizedPlan().toString()


def test_spark_reads_every_message_once_with_all_columns(session: SparkSession, filled: dict[str, str]) -> None:
    frame = load(session, filled, partitions="4")
    # As text, because Spark's rows have times of this machine's zone.
    times = {name: col(name).cast("string") for name in ("deliver_at", "scheduled_at", "dispatched_at")}
    rows = {row["id"]: row.asDict() for row in frame.withColumns(times).collect()}

    assert sorted(rows) == [f"m{number:02}" for number in range(30)]
    assert rows["m03"] == {
        "id": "m03",
        "channel": "channel.0",
        "state": "DISPATCHED",
        "deliver_at": "2026-01-01 12:00:01",
        "scheduled_at": "2026-01-01 12:00:01.5",
        "dispatched_at": "2026-01-01 12:00:01.5",
        "lateness_ms": 500,
        "payload": bytearray([3]),
        "content_type": "application/octet-stream",
        "key": "k",
        "headers": {"number": "3"},
        "priority": 0,
        "handled_count": 0,
        "dag_id": "d",
        "run_id": "r",
        "task_id": "t",
        "map_index": 3,
        "destination": None,
        "generation": 0,
    }
    waiting = rows["m10"]
    assert (waiting["state"], waiting["dispatched_at"], waiting["lateness_ms"]) == ("SCHEDULED", None, None)
    assert frame.rdd.getNumPartitions() == 4


def test_filters_give_the_same_rows_in_the_database_and_in_spark(session: SparkSession, filled: dict[str, str]) -> None:
    due = START + timedelta(seconds=3600 + 20)
    frame = load(session, filled, columns="id,state,deliver_at").where(
        (col("state") == "SCHEDULED") & (col("deliver_at") > lit(due)) & col("id").isin("m21", "m25", "m01")
    )

    assert sorted(row["id"] for row in frame.collect()) == ["m21", "m25"]
    # What the database has filtered, Spark does not filter again.
    assert ("SCHEDULED" in plan_of(frame)) is (session.conf.get(PUSHDOWN) == "false")


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        (EqualTo(("state",), "CANCELLED"), ["m29"]),
        (EqualTo(("state",), "cancelled"), []),
        (In(("channel",), ("channel.1", "none")), [f"m{number:02}" for number in range(1, 30, 3)]),
        (EqualTo(("dag_id",), "d"), ["m03"]),
        (GreaterThan(("deliver_at",), START + timedelta(seconds=3628)), ["m29"]),
        (GreaterThanOrEqual(("deliver_at",), START + timedelta(seconds=3628)), ["m28", "m29"]),
        # The column has milliseconds, and the filter microseconds.
        (GreaterThanOrEqual(("deliver_at",), START + timedelta(seconds=3628, microseconds=1)), ["m29"]),
        (LessThan(("deliver_at",), START + timedelta(seconds=3610)), [f"m{number:02}" for number in range(10)]),
        (LessThan(("deliver_at",), START + timedelta(seconds=3610, microseconds=1)), [f"m{n:02}" for n in range(11)]),
        (LessThanOrEqual(("deliver_at",), START + timedelta(seconds=3610)), [f"m{number:02}" for number in range(11)]),
        (LessThan(("dispatched_at",), START + timedelta(days=1)), [f"m{number:02}" for number in range(10)]),
    ],
    ids=str,
)
def test_a_pushed_filter_selects_rows_in_the_database(filled: dict[str, str], condition: Any, ids: list[str]) -> None:
    assert sorted(row["id"] for row in read_rows([condition], **filled, columns="id")) == ids


def test_columns_are_read_in_the_order_that_is_asked_for(session: SparkSession, filled: dict[str, str]) -> None:
    assert load(session, filled, columns="channel, id").columns == ["channel", "id"]
    assert load(session, filled, columns="channel, id").count() == 30


def test_large_payloads_come_in_small_batches(ledger: Ledger, tmp_path: Path) -> None:
    broker = EmbeddedBroker(ledger)
    due = datetime.now(UTC) + timedelta(hours=1)
    for first in range(0, 300, 50):
        numbers = range(first, first + 50)
        broker.schedule([Message(id=str(n), channel="c", payload=b"x" * 200_000, deliver_at=due) for n in numbers])
    file = write_connection(tmp_path, ledger.url.render_as_string(hide_password=False))
    reader = make_reader(connection=NAME, connectionFile=file)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]

    assert sum(batch.num_rows for batch in batches) == 300
    assert max(batch.nbytes for batch in batches) < 40_000_000


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tabel": "journal"}, "tabel: spark.read has no such option; use one of connection, "),
        ({"table": "queue"}, "table: 'queue' is unknown; use one of messages, journal"),
        ({"columns": "id,secret"}, "columns: 'secret' is no column of table messages; use some of id, channel"),
        ({"partitions": "0"}, "partitions: '0' is not a number of partitions; use 1 to 10000"),
        ({"after": "{}"}, "after: is an option of the journal; add option table=journal, or leave it"),
        ({"connection": "other"}, "connection 'other'; export it, too"),
    ],
)
def test_an_option_that_does_not_fit_is_named_before_anything_is_read(
    filled: dict[str, str], options: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_rows(**{**filled, **options})

    assert problem in str(refused.value)


def test_spark_shows_the_sentence_of_a_wrong_option(session: SparkSession, filled: dict[str, str]) -> None:
    with pytest.raises(Exception, match="table: 'queue' is unknown; use one of messages, journal"):
        load(session, filled, table="queue")


def test_a_ledger_without_tables_is_a_clear_error(empty_postgres_url: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="run `airflow delay db migrate`"):
        read_rows(connection=NAME, connectionFile=write_connection(tmp_path, empty_postgres_url))
