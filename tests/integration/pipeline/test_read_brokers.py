"""``table=journal`` of RabbitMQ and Kafka, and the messages of a broker that a dispatcher copies into the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pika
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThan

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.datasource.journal import journal_end
from tests.integration.pipeline.reading import read_rows
from tests.integration.pipeline.three_brokers import LEDGER, RABBIT, STREAM, ThreeBrokers, three_brokers
from tests.rabbits import under_test
from tools.servers.component import wait_for


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeBrokers]:
    with three_brokers(tmp_path_factory.mktemp("brokers")) as running:
        yield running


def send(scene: ThreeBrokers, connection: str, channel: str, count: int, *, after: float = 0.5) -> list[str]:
    """Schedule messages and wait until they are dispatched."""
    broker = scene.brokers[connection]
    due = broker.clock.now() + timedelta(seconds=after)
    messages = [Message(channel=channel, payload=b"x", deliver_at=due) for _ in range(count)]
    broker.schedule(messages)
    ids = sorted(message.id for message in messages)
    scene.wait_for_dispatch(connection, ids)
    return ids


def end_of(scene: ThreeBrokers, connection: str, **more: Any) -> str:
    return journal_end(connection, connection_file=str(scene.connection_file), **more)


def read(scene: ThreeBrokers, connection: str, *filters: Any, **more: str) -> list[dict[str, Any]]:
    return read_rows(filters, **scene.options(connection, table="journal", **more))


def changes(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((row["message_id"], row["change"]) for row in rows)


@pytest.mark.parametrize("connection", [RABBIT, STREAM])
def test_spark_reads_the_entries_that_the_broker_itself_reports(
    scene: ThreeBrokers, connection: str, spark: SparkSession
) -> None:
    ids = send(scene, connection, scene.channel(connection, f"orders-{connection}"), 30)

    frame = spark.read.format("delay").options(**scene.options(connection, table="journal")).load()

    expected = scene.wait_for_dispatch(connection, ids)
    rows = frame.selectExpr(
        "message_id", "channel", "change", "reason", "unix_millis(deliver_at) AS due", "unix_millis(at) AS at"
    ).collect()
    found = {(row["message_id"], row["change"]): row.asDict() for row in rows}
    assert len(rows) == len(found) == len(expected)
    for entry in expected:
        row = found[entry.message_id, entry.change]
        assert (row["channel"], row["reason"]) == (entry.channel, entry.reason)
        assert row["due"] == round(entry.deliver_at.timestamp() * 1000)
        if connection == STREAM or entry.change == "scheduled":
            assert row["at"] == round(entry.at.timestamp() * 1000)
    assert {row["destination"] for row in frame.collect()} == {connection}


@pytest.mark.parametrize("connection", [RABBIT, STREAM])
def test_a_read_after_a_position_finds_what_is_new_and_nothing_else(scene: ThreeBrokers, connection: str) -> None:
    channel = scene.channel(connection, f"invoices-{connection}")
    send(scene, connection, channel, 5)
    first = end_of(scene, connection)
    before = read(scene, connection, until=first)
    ids = send(scene, connection, channel, 7)
    second = end_of(scene, connection)

    new = read(scene, connection, after=first, until=second)

    assert changes(new) == sorted((each, change) for each in ids for change in ("scheduled", "dispatched"))
    assert read(scene, connection, until=first) == before
    assert changes(read(scene, connection, until=second)) == sorted([*changes(before), *changes(new)])
    assert read(scene, connection, after=second, until=second) == []
    dispatched = read(scene, connection, EqualTo(("change",), "dispatched"), after=first, until=second)
    assert changes(dispatched) == [(each, "dispatched") for each in ids]
    assert read(scene, connection, EqualTo(("channel",), "none"), after=first) == []


def test_rabbitmq_before_4_does_not_tell_when_it_dispatched_and_the_copy_does(scene: ThreeBrokers) -> None:
    position = end_of(scene, RABBIT)
    copied_position = end_of(scene, RABBIT, copied=True)
    ids = send(scene, RABBIT, scene.channel(RABBIT, "reminders"), 3)

    rows = {(row["message_id"], row["change"]): row for row in read(scene, RABBIT, after=position)}
    for each in ids:
        assert rows[each, "scheduled"]["time_source"] == "recorded"
        dispatch = rows[each, "dispatched"]
        assert (dispatch["time_source"], dispatch["at"], dispatch["lateness_ms"]) == ("unknown", None, None)

    def copied() -> list[dict[str, Any]] | None:
        found = read(scene, RABBIT, EqualTo(("change",), "dispatched"), after=copied_position, copied="true")
        return found if len(found) == 3 else None

    for row in wait_for(copied, what="the copies", seconds=60, interval=0.3):
        assert (row["time_source"], row["destination"]) == ("read", RABBIT)
        assert row["lateness_ms"] >= 0
    assert {row["connection"] for row in read(scene, LEDGER)} <= {LEDGER}


def test_rabbitmq_4_tells_the_second_in_which_it_dispatched(tmp_path: Path) -> None:
    with under_test("rabbitmq4"), three_brokers(tmp_path) as scene:
        began = scene.brokers[RABBIT].clock.now()
        ids = send(scene, RABBIT, scene.channel(RABBIT, "reminders"), 3, after=1.3)
        ended = scene.brokers[RABBIT].clock.now()

        rows = read(scene, RABBIT, EqualTo(("change",), "dispatched"))

    assert sorted(row["message_id"] for row in rows) == ids
    for row in rows:
        assert row["time_source"] == "second"
        assert row["at"] == row["deliver_at"] or row["at"].microsecond == 0
        # The end of that second.
        assert began < row["deliver_at"] <= row["at"] <= ended + timedelta(seconds=1)
        assert row["lateness_ms"] == (row["at"] - row["deliver_at"]) // timedelta(milliseconds=1)


def test_a_dispatch_to_a_queue_that_is_gone_is_parked_in_the_journal_too(scene: ThreeBrokers) -> None:
    channel = scene.channel(RABBIT, "gone")
    broker = scene.brokers[RABBIT]
    message = Message(channel=channel, payload=b"x", deliver_at=broker.clock.now() + timedelta(seconds=2))
    broker.schedule([message])
    with pika.BlockingConnection(pika.URLParameters(scene.rabbit_url)) as connection:
        connection.channel().queue_delete(channel)

    def parked() -> list[dict[str, Any]] | None:
        found = [row for row in read(scene, RABBIT) if row["message_id"] == message.id]
        return found if "parked" in {row["change"] for row in found} else None

    rows = wait_for(parked, what="the message is parked", seconds=60, interval=0.5)
    assert [row["change"] for row in rows] == ["scheduled", "parked"]


def test_the_messages_of_a_broker_are_those_that_a_dispatcher_copies(scene: ThreeBrokers) -> None:
    ids = send(scene, STREAM, scene.channel(STREAM, "listed"), 4)
    send(scene, LEDGER, "listed", 2)

    def listed() -> list[dict[str, Any]] | None:
        rows = read_rows(**scene.options(STREAM))
        done = {row["id"] for row in rows if row["state"] == "DISPATCHED"}
        return rows if set(ids) <= done else None

    rows = wait_for(listed, what="the copies", seconds=60, interval=0.3)
    assert {row["destination"] for row in rows} == {STREAM}
    everything = read_rows(**scene.options(LEDGER))
    assert {STREAM, None} <= {row["destination"] for row in everything}


def test_kafka_starts_at_the_time_of_a_filter_and_never_behind_it(scene: ThreeBrokers) -> None:
    ids = send(scene, STREAM, scene.channel(STREAM, "times"), 3)
    now = scene.brokers[STREAM].clock.now()

    recent = read(scene, STREAM, GreaterThan(("at",), now - timedelta(minutes=10)))
    assert {each for each, _ in changes(recent)} >= set(ids)
    # Spark filters exactly; the reader only leaves out records that are too old by far.
    assert read(scene, STREAM, GreaterThan(("at",), now + timedelta(days=2))) == []


def test_deleted_records_of_kafka_are_a_gap_that_is_told(scene: ThreeBrokers) -> None:
    channel = scene.channel(STREAM, "gap")
    position = end_of(scene, STREAM)
    send(scene, STREAM, channel, 3)
    delete_journal(scene)
    ids = send(scene, STREAM, channel, 2)

    with pytest.raises(ConfigurationError, match=r"after: [0-9]+ records behind the position are deleted.*onGap"):
        read(scene, STREAM, after=position)
    rows = read(scene, STREAM, after=position, onGap="continue")
    assert changes(rows) == sorted((each, change) for each in ids for change in ("scheduled", "dispatched"))


def delete_journal(scene: ThreeBrokers) -> None:
    broker = scene.brokers[STREAM]
    assert isinstance(broker, KafkaBroker)
    topology = broker.topology
    partitions = [TopicPartition(topology.journal, number, -1) for number in range(topology.partitions)]
    with AdminClient({"bootstrap.servers": scene.bootstrap}) as admin:
        for done in admin.delete_records(partitions).values():
            done.result(30)
