"""``table=journal`` of ledgers: positions that skip nothing and repeat nothing, whatever commits when."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In
from pyspark.sql.functions import col
from sqlalchemy import text

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.datasource.journal import journal_end
from tests.integration.pipeline.reading import NAME, make_reader, read_rows, write_connection

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def options(ledger: Ledger, tmp_path: Path) -> dict[str, str]:
    ledger.migrate()
    file = write_connection(tmp_path, ledger.url.render_as_string(hide_password=False))
    return {"connection": NAME, "connectionFile": file, "table": "journal"}


@pytest.fixture
def end(options: dict[str, str]) -> Callable[[], str]:
    return lambda: journal_end(NAME, connection_file=options["connectionFile"])


def schedule(ledger: Ledger, *ids: str, after: timedelta = timedelta(hours=1)) -> None:
    broker = EmbeddedBroker(ledger)
    due = broker.clock.now() + after
    broker.schedule([Message(id=each, channel=f"c.{each[0]}", payload=b"x", deliver_at=due) for each in ids])


def ids_of(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(row["message_id"] for row in rows)


def test_the_journal_has_every_change_and_lateness_for_dispatches_only(ledger: Ledger, options: dict[str, str]) -> None:
    """M10"""
    schedule(ledger, "a1", "b1")
    EmbeddedBroker(ledger).cancel(["b1"])
    schedule(ledger, "late", after=timedelta(seconds=-2))

    rows = read_rows(**options)

    changes = {(row["message_id"], row["change"]): row for row in rows}
    assert sorted(changes) == [
        ("a1", "scheduled"),
        ("b1", "cancelled"),
        ("b1", "scheduled"),
        ("late", "dispatched"),
        ("late", "scheduled"),
    ]
    dispatched = changes["late", "dispatched"]
    assert dispatched["lateness_ms"] == (dispatched["at"] - dispatched["deliver_at"]) // timedelta(milliseconds=1)
    assert dispatched["lateness_ms"] >= 2000
    assert {row["lateness_ms"] for row in rows if row is not dispatched} == {None}
    assert {(row["connection"], row["destination"], row["time_source"]) for row in rows} == {(NAME, None, "recorded")}


def test_two_reads_that_share_a_position_find_each_entry_once(
    ledger: Ledger, options: dict[str, str], end: Callable[[], str]
) -> None:
    beginning = end()
    schedule(ledger, "a1", "a2")
    middle = end()
    schedule(ledger, "a3")
    last = end()
    schedule(ledger, "a4")

    assert ids_of(read_rows(**options, until=beginning)) == []
    assert ids_of(read_rows(**options, until=middle)) == ["a1", "a2"]
    assert ids_of(read_rows(**options, after=middle, until=last)) == ["a3"]
    assert ids_of(read_rows(**options, after=last)) == ["a4"]
    assert ids_of(read_rows(**options, after=last, until=last)) == []


def test_an_entry_whose_transaction_ends_later_is_in_the_next_read(postgres_url: str, tmp_path: Path) -> None:
    """Numbers are handed out before transactions end: the first writer commits last."""
    file = write_connection(tmp_path, postgres_url)
    given = {"connection": NAME, "connectionFile": file, "table": "journal"}
    with closing(Ledger(postgres_url)) as ledger, closing(Ledger(postgres_url)) as slow:
        schedule(ledger, "before")
        with slow.engine.begin() as transaction:
            transaction.execute(
                text(
                    "INSERT INTO delay_event (xid, message_seq, message_id, channel, change, at_ms, deliver_at_ms)"
                    " VALUES (pg_current_xact_id()::text::bigint, 99, 'slow', 'c', 'scheduled', 0, 0)"
                )
            )
            schedule(ledger, "overtook")
            position = journal_end(NAME, connection_file=file)
            first = ids_of(read_rows(**given, until=position))
        second = ids_of(read_rows(**given, after=position))

    assert first == ["before"]
    assert second == ["overtook", "slow"]


def test_entries_that_come_after_planning_are_not_read(ledger: Ledger, options: dict[str, str]) -> None:
    schedule(ledger, "a1")
    reader = make_reader(**options)
    schedule(ledger, "a2")

    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    assert ids_of(rows) == ["a1"]


def test_a_journal_is_read_by_several_tasks_and_each_entry_once(
    spark: SparkSession, ledger: Ledger, options: dict[str, str], end: Callable[[], str]
) -> None:
    schedule(ledger, "x0")
    after = end()
    schedule(ledger, *(f"{'ab'[number % 2]}{number}" for number in range(200)))
    spark.conf.set(PUSHDOWN, "true")
    try:
        frame = spark.read.format("delay").options(**options, partitions="3", after=after).load()
        assert frame.rdd.getNumPartitions() == 3
        assert frame.count() == frame.select("position").distinct().count() == 200
        assert frame.where(col("channel") == "c.a").count() == 100
    finally:
        spark.conf.unset(PUSHDOWN)


def test_changes_channels_and_times_are_filtered_in_the_database(ledger: Ledger, options: dict[str, str]) -> None:
    schedule(ledger, "a1", "b1")
    EmbeddedBroker(ledger).cancel(["b1"])
    now = datetime.now(UTC)

    assert ids_of(read_rows([EqualTo(("change",), "cancelled")], **options)) == ["b1"]
    assert ids_of(read_rows([In(("change",), ("cancelled", "scheduled"))], **options)) == ["a1", "b1", "b1"]
    assert ids_of(read_rows([EqualTo(("channel",), "c.a")], **options)) == ["a1"]
    assert ids_of(read_rows([GreaterThanOrEqual(("at",), now + timedelta(minutes=1))], **options)) == []
    assert len(read_rows([GreaterThanOrEqual(("at",), now - timedelta(minutes=1))], **options)) == 3


def test_a_copy_of_another_journal_is_not_part_of_the_ledgers_own(ledger: Ledger, options: dict[str, str]) -> None:
    schedule(ledger, "own", "copied")
    with ledger.engine.execution_options(writes=True).begin() as connection:
        connection.execute(
            text("UPDATE delay_scheduled_message SET destination = 'rabbit', held_by_broker = 1 WHERE id = 'copied'")
        )
        connection.execute(text("INSERT INTO delay_journal_position (destination, position) VALUES ('rabbit', '1.0')"))
    file = Path(options["connectionFile"])
    url = ledger.url.render_as_string(hide_password=False)
    rabbit = {"conn_type": "rabbitmq", "host": "nowhere", "extra": {"ledger_url": url}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rabbit": rabbit}))

    assert ids_of(read_rows(**options)) == ["own"]
    copy = read_rows(**{**options, "connection": "rabbit"}, copied="true")
    assert [(row["message_id"], row["destination"], row["connection"]) for row in copy] == [
        ("copied", "rabbit", "rabbit")
    ]
    with pytest.raises(ConfigurationError, match="copied: the journal of 'ledger' is in the ledger itself"):
        read_rows(**options, copied="true")


# -- positions that do not fit --------------------------------------------------------------------------------------


def changed(position: str, **values: Any) -> str:
    return json.dumps(json.loads(position) | values)


def test_an_old_position_is_refused_because_entries_behind_it_may_be_deleted(
    ledger: Ledger, options: dict[str, str], end: Callable[[], str]
) -> None:
    position = json.loads(end())
    schedule(ledger, "a1")
    old = changed(json.dumps(position), taken_at_ms=position["taken_at_ms"] - 31 * 86_400_000)

    with pytest.raises(ConfigurationError, match=r"after: the position is of .* may be missing; read without it"):
        read_rows(**options, after=old)
    assert ids_of(read_rows(**options, after=old, retentionDays="40")) == ["a1"]
    assert ids_of(read_rows(**options, after=old, onGap="continue")) == ["a1"]


def test_a_position_of_another_ledger_is_refused(options: dict[str, str], end: Callable[[], str]) -> None:
    other = changed(end(), journal=f"ledger {uuid4()}")

    with pytest.raises(ConfigurationError, match=r"after: is a position of the journal 'ledger .* read it without"):
        read_rows(**options, after=other)


def test_a_position_behind_the_end_is_refused(options: dict[str, str], end: Callable[[], str]) -> None:
    """The database was restored from a backup."""
    with pytest.raises(ConfigurationError, match="after: is behind the end of the journal"):
        read_rows(**options, after=changed(end(), numbers=[10**12, 10**12]))


def test_positions_in_the_wrong_order_are_refused(
    ledger: Ledger, options: dict[str, str], end: Callable[[], str]
) -> None:
    first = end()
    schedule(ledger, "a1")

    with pytest.raises(ConfigurationError, match="after: is behind until; swap the positions"):
        read_rows(**options, after=end(), until=first)


@pytest.mark.parametrize("given", ["", "yesterday", "[]", '{"journal": "x"}', '{"journal": 1, "numbers": "a"}'])
def test_a_text_that_is_no_position_is_refused(options: dict[str, str], given: str) -> None:
    with pytest.raises(ConfigurationError, match=r"after: (is empty|.* is no position; use one that journal_end)"):
        read_rows(**options, after=given)
