"""What is wrong for all rows is one clear error, before any row is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from sqlalchemy.engine import make_url

from tests import kafkas, rabbits
from tests.databases import require_postgres
from tests.integration.pipeline.targets import Target, serving, target_of
from tests.rabbits import require_rabbitmq
from tools.servers.kafka import free_ports

ROW = "SELECT 'p' AS payload, 3600 AS deliver_after"
SECRET = "planted-passw0rd"


def failure_of(target: Target, spark: SparkSession, query: str = ROW, mode: str = "append", **options: str) -> str:
    """Return the last line that our error has in the text of a failed write."""
    with pytest.raises(PySparkException) as failed:
        spark.sql(query).write.format("delay").mode(mode).options(**target.options | options).save()
    text = str(failed.value)
    assert SECRET not in text
    lines = [line for line in text.splitlines() if line.startswith("airflow_delay_provider.domain.exceptions.")]
    assert len(lines) > 0, text
    return re.sub(r"^\S+: ", "", lines[-1])


@pytest.fixture
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    with serving("sqlite", tmp_path, request) as target:
        return target


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        (
            "SELECT 'p' AS payload, 1 AS deliver_after, 2 AS extra",
            "extra: is not a column of a message; drop or rename",
        ),
        (
            "SELECT 'p' AS payload, TIMESTAMP_NTZ '2030-01-01 00:00:00' AS deliver_at",
            "deliver_at: timestamp_ntz has no",
        ),
        ("SELECT struct(1 AS a) AS payload, 1 AS deliver_after", "payload: struct<a:int> is not string or binary"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_any_row(
    spark: SparkSession, ledger: Target, query: str, sentence: str
):
    assert failure_of(ledger, spark, query).startswith(sentence)
    assert ledger.scheduled_ids() == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chanel": "orders"}, "chanel: df.write has no such option; use one of connection,"),
        ({"path": "/tmp"}, "path: df.write has no such option"),
        ({"onRejects": "keep"}, "rejects: onRejects=keep needs a folder"),
        ({"rejects": "s3://key:" + SECRET + "@bucket/x"}, "rejects: the URI contains credentials"),
        ({"hold": "broker"}, "hold: connection 'delay_pipeline' (type delay) stores messages in the ledger"),
        ({"connection": "other"}, "connectionFile: "),
        ({"connectionFile": "/nowhere.json"}, "connectionFile: /nowhere.json cannot be read"),
    ],
)
def test_wrong_options_are_refused(spark: SparkSession, ledger: Target, options: dict[str, str], sentence: str):
    assert failure_of(ledger, spark, **options).startswith(sentence)


def test_overwriting_is_refused(spark: SparkSession, ledger: Target):
    sentence = 'mode: scheduled messages cannot be overwritten as a whole; use .mode("append")'
    assert failure_of(ledger, spark, mode="overwrite") == sentence


def test_a_ledger_without_tables_is_refused(spark: SparkSession, empty_postgres_url: str, tmp_path: Path):
    connection = {"conn_type": "delay", "extra": {"ledger_url": empty_postgres_url}}
    target = target_of("postgresql", tmp_path, connection, "orders")
    assert "run `airflow delay db migrate`" in failure_of(target, spark)


def away(broker: str) -> dict[str, Any]:
    """A connection to a port where nothing listens."""
    [port] = free_ports(1)
    match broker:
        case "postgresql":
            url = f"postgresql+psycopg://delay:{SECRET}@127.0.0.1:{port}/delay"
            return {"conn_type": "delay", "extra": {"ledger_url": url}}
        case "rabbitmq":
            url = f"amqp://guest:{SECRET}@127.0.0.1:{port}/%2F"
            return rabbits.connection_of(url)
    return kafkas.connection_of(f"127.0.0.1:{port}")


@pytest.mark.parametrize("broker", ["postgresql", "rabbitmq", "kafka"])
def test_a_broker_that_is_away_is_one_sentence(spark: SparkSession, broker: str, tmp_path: Path):
    jobs_before = len(spark.sparkContext.statusTracker().getJobIdsForGroup(None))
    sentence = failure_of(target_of(broker, tmp_path, away(broker), "orders"), spark)
    assert re.search(r"cannot be reached|not reachable|no answer|does not answer|is not there", sentence), sentence
    # No task has begun.
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup(None)) == jobs_before


def test_a_wrong_password_is_one_sentence(spark: SparkSession, tmp_path: Path):
    parts = urlsplit(require_rabbitmq())
    connection = rabbits.connection_of(parts._replace(netloc=f"guest:{SECRET}@{parts.hostname}:{parts.port}").geturl())
    sentence = failure_of(target_of("rabbitmq", tmp_path, connection, "orders"), spark)
    assert "login" in sentence.lower() or "password" in sentence.lower(), sentence


def test_an_unknown_database_is_one_sentence(spark: SparkSession, tmp_path: Path):
    url = make_url(require_postgres()).set(database="nowhere", password=SECRET).render_as_string(hide_password=False)
    target = target_of("postgresql", tmp_path, {"conn_type": "delay", "extra": {"ledger_url": url}}, "orders")
    assert 'database "nowhere" does not exist' in failure_of(target, spark)


@pytest.mark.parametrize("broker", ["rabbitmq", "kafka"])
def test_a_missing_channel_fails_the_write_whether_it_is_an_option_or_a_column(
    spark: SparkSession, broker: str, tmp_path: Path, request: pytest.FixtureRequest
):
    with serving(broker, tmp_path, request) as target:
        assert "'nowhere'" in failure_of(target, spark, channel="nowhere")
        assert "'nowhere'" in failure_of(target, spark, f"SELECT *, 'nowhere' AS channel FROM ({ROW})")


def test_a_broker_that_does_not_know_ids_refuses_conflict_policies(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
):
    with serving("kafka", tmp_path, request) as target:
        sentence = failure_of(target, spark, onConflict="replace")
        assert sentence.startswith("onConflict: the broker of 'delay_pipeline' cannot check whether an id is taken")
        assert sentence.endswith("use onConflict=keep, or hold=ledger")


def test_streams_are_told_to_use_batches(spark: SparkSession, ledger: Target, tmp_path: Path):
    rows = spark.readStream.format("rate").load().selectExpr("'p' AS payload", "1 AS deliver_after")
    stream = rows.writeStream.format("delay").options(**ledger.options).trigger(availableNow=True)
    query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(PySparkException, match='format: "delay" is not written by streams; use foreachBatch'):
        query.awaitTermination(120)
