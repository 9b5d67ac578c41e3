"""DataFrames that Spark's own Kafka sink writes to the inbox, and a real dispatcher that delivers them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from confluent_kafka import Message as Record
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError, UnknownChannelError
from airflow_delay_provider.spark.kafka_sink import InboxRejectsError, InboxReport, write_to_inbox
from tests.acceptance.kafka_soak import read_to_end
from tests.kafkas import connection_of, delete_ladder, dispatching, fresh_topic, read_all, require_kafka
from tests.sparks import CONF, JOBS
from tools.servers.component import wait_for
from tools.servers.spark import client_environment

pytestmark = pytest.mark.timeout(600)

FUTURE = datetime(2030, 1, 31, 17, 0, 0, 123_400, tzinfo=UTC)
FUTURE_MS = 1_896_109_200_124


@dataclass(frozen=True)
class Inbox:
    """A ladder of one test, which no dispatcher serves unless the test runs one."""

    bootstrap: str
    broker: KafkaBroker
    connection_file: Path

    def write(self, df: DataFrame, **more: Any) -> InboxReport:
        return write_to_inbox(df, "stream", connection_file=str(self.connection_file), **more)

    def all_records(self) -> list[Record]:
        return list(read_to_end(self.bootstrap, [self.broker.topology.inbox]))

    def topic(self, **config: Any) -> str:
        return fresh_topic(self.bootstrap, **config)


def write_connection(file: Path, bootstrap: str, **settings: Any) -> Path:
    file.write_text(json.dumps({"stream": connection_of(bootstrap, **settings)}))
    return file


@pytest.fixture(scope="module")
def inbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inbox]:
    bootstrap = require_kafka()
    settings = {"ladder": f"sink-{uuid4().hex[:8]}", "partitions": 2, "max_payload_bytes": 100_000}
    file = write_connection(tmp_path_factory.mktemp("connections") / "c.json", bootstrap, **settings)
    with KafkaBroker(KafkaConfig.from_settings(settings, host=bootstrap)) as broker:
        broker.create_topology()
        yield Inbox(bootstrap, broker, file)
        delete_ladder(broker)


def headers_of(record: Record) -> dict[str, str]:
    return {name: value.decode() for name, value in record.headers() or ()}


def request_of(record: Record) -> Any:
    return protocol.decode_request(
        default_id="",
        key=record.key(),
        value=record.value(),
        headers=record.headers() or [],
        timestamp_ms=record.timestamp()[1],
    )


def ours(records: list[Record], channel: str) -> list[Record]:
    return [each for each in records if headers_of(each)[protocol.CHANNEL] == channel]


def test_every_column_reaches_the_inbox(spark: SparkSession, inbox: Inbox) -> None:
    channel = inbox.topic()
    rows = spark.createDataFrame(
        [("order-1", channel, b"\x00\xff", FUTURE, "customer 7", {"tenant": "münchen"}, "image/png", 9)],
        "id string, channel string, payload binary, deliver_at timestamp, key string, headers map<string,string>,"
        " content_type string, priority int",
    )

    report = inbox.write(rows)

    assert report == InboxReport(inbox=inbox.broker.topology.inbox, rows=1, scheduled=1, rejected=0)
    [record] = ours(inbox.all_records(), channel)
    message = request_of(record)
    assert (message.id, message.channel, message.payload) == ("order-1", channel, b"\x00\xff")
    # Never early: a part of a millisecond counts as a whole one.
    assert headers_of(record)[protocol.DELIVER_AT] == str(FUTURE_MS)
    assert (message.key, dict(message.headers)) == ("customer 7", {"tenant": "münchen"})
    assert (message.content_type, message.priority) == ("image/png", 9)
    assert record.partition() == inbox.broker.topology.partition_of("customer 7", "order-1")


def test_times_are_those_that_python_reads(spark: SparkSession, inbox: Inbox) -> None:
    channel = inbox.topic()
    texts = [
        "2030-01-31T17:00:00Z",
        "2030-01-31T18:00:00.123456+01:00",
        "2030-01-31 18:00:00,5+0100",
        " 2030-01-31T18:00+01 ",
        "2030-01-31t17:00:00z",
        "1969-12-31T23:59:59.9995Z",
        "1583-01-01T00:00:00.000001Z",
    ]
    rows = spark.createDataFrame([(text, text) for text in texts], "payload string, deliver_at string")

    inbox.write(rows, channel=channel)

    found = {(record.value() or b"").decode(): record for record in ours(inbox.all_records(), channel)}
    for text in texts:
        expected = protocol.ceil_ms(datetime.fromisoformat(text.strip().replace(",", ".").upper()))
        assert headers_of(found[text])[protocol.DELIVER_AT] == str(expected), text


@pytest.mark.parametrize(
    ("expression", "after_ms"),
    [
        ("2", "2000"),
        ("0.0011D", "2"),
        ("4.35D", "4350"),
        ("CAST(1.5 AS DECIMAL(9,3))", "1500"),
        ("INTERVAL '1 02:03:04.5' DAY TO SECOND", "93784500"),
        ("INTERVAL '90' MINUTE", "5400000"),
        ("-1", "-1000"),
    ],
)
def test_a_delay_is_a_number_of_seconds_or_an_interval(
    spark: SparkSession, inbox: Inbox, expression: str, after_ms: str
) -> None:
    channel = inbox.topic()
    rows = spark.range(1).select(f.lit("x").alias("payload"), f.expr(expression).alias("deliver_after"))

    inbox.write(rows, channel=channel)

    [record] = ours(inbox.all_records(), channel)
    assert headers_of(record)[protocol.DELIVER_AFTER_MS] == after_ms
    assert protocol.DELIVER_AT not in headers_of(record)
    assert headers_of(record)[protocol.CONTENT_TYPE] == "text/plain; charset=utf-8"


def test_derived_ids_are_those_of_the_rows_in_every_run(spark: SparkSession, inbox: Inbox) -> None:
    channel = inbox.topic()
    rows = spark.range(20).select(
        f.col("id").cast("string").alias("payload"),
        f.lit(FUTURE).alias("deliver_at"),
        f.create_map(f.lit("a"), f.lit("1"), f.lit("b"), f.lit("2")).alias("headers"),
    )
    twins = rows.withColumn("headers", f.create_map(f.lit("b"), f.lit("2"), f.lit("a"), f.lit("1")))

    for df, prefix in ((rows, ""), (twins.repartition(3), ""), (rows, "tomorrow")):
        inbox.write(df, channel=channel, id_prefix=prefix)

    ids = [headers_of(record)[protocol.ID] for record in ours(inbox.all_records(), channel)]
    assert len(ids) == 60
    assert len(set(ids)) == 40
    assert {UUID(each).version for each in ids} == {8}


def test_messages_are_delivered_when_due_and_those_of_a_key_in_order(spark: SparkSession, inbox: Inbox) -> None:
    channel = inbox.topic()
    begin = datetime.now(UTC)
    rows = spark.range(40).select(
        f.col("id").cast("string").alias("payload"),
        f.concat(f.lit("key "), (f.col("id") % 4).cast("string")).alias("key"),
        (f.lit(2) + f.col("id") * 0.01).alias("deliver_after"),
    )

    inbox.write(rows.coalesce(1), channel=channel)
    with dispatching(inbox.broker):
        records = read_all(inbox.bootstrap, channel, 40)

    by_key: dict[bytes | str | None, list[int]] = {}
    for record in records:
        by_key.setdefault(record.key(), []).append(int(record.value() or b""))
        assert int(headers_of(record)[protocol.DELIVER_AT]) >= (begin + timedelta(seconds=2)).timestamp() * 1000
        assert record.timestamp()[1] >= int(headers_of(record)[protocol.DELIVER_AT])
    assert {key: len(values) for key, values in by_key.items()} == {f"key {n}".encode(): 10 for n in range(4)}
    assert all(values == sorted(values) for values in by_key.values())


def test_a_task_that_fails_once_its_records_are_sent_loses_none_and_repeats_them_with_the_same_ids(
    inbox: Inbox, kafka_connector: str
) -> None:
    channel, rows = inbox.topic(), 1000
    # With two attempts for each task.
    command = ["spark-submit", "--master", "local[2,2]", "--jars", kafka_connector]
    command += [word for name, value in CONF.items() for word in ("--conf", f"{name}={value}")]
    command += [str(JOBS / "write_to_inbox_with_fault.py"), str(inbox.connection_file), channel]
    done = subprocess.run(
        [*command, inbox.bootstrap, inbox.broker.topology.inbox, str(rows)],
        env={**os.environ, **client_environment()},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"rows={rows}, scheduled={rows}, rejected=0" in done.stdout
    arrived, ids = Counter[int](), dict[int, set[str]]()
    for record in ours(inbox.all_records(), channel):
        number = int((record.value() or b"").split()[0])
        arrived[number] += 1
        ids.setdefault(number, set()).add(headers_of(record)[protocol.ID])
    assert arrived.keys() == set(range(rows))
    assert 100 <= arrived.total() - rows <= rows
    assert {len(each) for each in ids.values()} == {1}
    assert len({message_id for each in ids.values() for message_id in each}) == rows


# -- rows that do not fit ------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "id": "good",
    "channel": None,
    "payload": "x",
    "deliver_at": "2030-01-31T17:00:00Z",
    "deliver_after": None,
    "key": None,
    "headers": None,
    "content_type": None,
    "priority": None,
}
SCHEMA = (
    "id string, channel string, payload string, deliver_at string, deliver_after double, key string,"
    " headers map<string,string>, content_type string, priority int"
)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "null id": ({"id": None}, "id: is null; give each row an id"),
    "empty id": ({"id": ""}, "id: is not a valid id; use 1-255 printable characters"),
    "unprintable id": ({"id": "a\nb"}, "id: is not a valid id"),
    "wide space in id": ({"id": "a\u2003b"}, "id: is not a valid id"),
    "long id": ({"id": "x" * 256}, "id: is not a valid id"),
    "channel with a space": ({"channel": "a b"}, "channel: 'a b' cannot be a Kafka topic; use 1-249"),
    "channel with a line feed": ({"channel": "orders\n"}, "cannot be a Kafka topic"),
    "channel of Kafka": ({"channel": "__offsets"}, "channel: '__offsets' belongs to Kafka or to a ladder"),
    "channel of a ladder": ({"channel": "delay.v1.inbox"}, "channel: 'delay.v1.inbox' belongs to Kafka or to a ladder"),
    "null payload": ({"payload": None}, "payload: is null"),
    "large payload": ({"payload": "x" * 100_001}, "payload: 100001 bytes are more than max_payload_bytes (100000)"),
    "NUL in key": ({"key": "a\0"}, "key: is not text"),
    "reserved header": ({"headers": {"delay-id": "1"}}, "headers: 'delay-id' is reserved; use another name"),
    "content-type as header": ({"headers": {"content-type": "a"}}, "headers: 'content-type' is reserved"),
    "null in headers": ({"headers": {"a": None}}, "headers: a value is null or not text"),
    "empty name in headers": ({"headers": {"": "a"}}, "headers: a name is empty"),
    "large headers": ({"headers": {"a": "x" * 100_000}}, "headers: headers and key have more than 100000 bytes"),
    "long content type": ({"content_type": "x" * 256}, "content_type: is not a content type"),
    "low priority": ({"priority": -1}, "priority: -1 is out of range; use 0 to 255"),
    "high priority": ({"priority": 256}, "priority: 256 is out of range"),
    "no time": ({"deliver_at": None}, "deliver_at: is null, and so is deliver_after; give one of them"),
    "two times": ({"deliver_after": 1.0}, "deliver_at: deliver_after is given, too; give only one of them"),
    "naive time": ({"deliver_at": "2030-01-31T17:00:00"}, "'2030-01-31T17:00:00' has no time zone; add one"),
    "no such day": ({"deliver_at": "2030-02-31T17:00:00Z"}, "deliver_at: '2030-02-31T17:00:00Z' is not a time"),
    "a word": ({"deliver_at": "tomorrow"}, "deliver_at: 'tomorrow' is not a time; use ISO-8601"),
    "time too far": ({"deliver_at": "2999-01-01T00:00:00Z"}, "deliver_at: is more than max_delay (3660 days, 0:00:00)"),
    "delay too far": ({"deliver_at": None, "deliver_after": 1e9}, "deliver_after: is more than max_delay"),
    "delay that is no number": ({"deliver_at": None, "deliver_after": float("nan")}, "deliver_after: is not a delay"),
    "endless delay": ({"deliver_at": None, "deliver_after": float("inf")}, "deliver_after: is not a delay"),
}


def rows_of(spark: SparkSession, rows: list[Mapping[str, Any]]) -> DataFrame:
    return spark.createDataFrame([tuple({**GOOD, **row}.values()) for row in rows], SCHEMA)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("rejects-*.jsonl") for line in file.read_text().splitlines()]


def read_by(spark: SparkSession, read: Callable[[Iterator[int]], Iterator[tuple[Any, ...]]]) -> DataFrame:
    """Return the rows that a function yields, each time anew, in one task."""
    return spark.createDataFrame(spark.sparkContext.parallelize([0], 1).mapPartitions(read), SCHEMA)


def test_rows_that_do_not_fit_are_kept_with_the_reason_and_all_others_are_scheduled(
    spark: SparkSession, inbox: Inbox, tmp_path: Path
) -> None:
    channel, folder = inbox.topic(), tmp_path / "rejects"
    good = [{"id": f"good {number}"} for number in range(3)]
    rows = rows_of(spark, [*good, *(row for row, _ in BAD.values())])

    report = inbox.write(rows, channel=channel, on_rejects="keep", rejects=str(folder))

    assert (report.rows, report.scheduled, report.rejected) == (3 + len(BAD), 3, len(BAD))
    assert sorted(report.rejects) == sorted(str(file) for file in folder.iterdir())
    records = ours(inbox.all_records(), channel)
    assert sorted(headers_of(record)[protocol.ID] for record in records) == ["good 0", "good 1", "good 2"]
    lines = lines_in(folder)
    assert len(lines) == len(BAD)
    by_row = {json.dumps(line["row"], sort_keys=True): line for line in lines}
    for name, (changed, reason) in BAD.items():
        row = {**GOOD, **changed}
        if name in ("delay that is no number", "endless delay"):
            row["deliver_after"] = "NaN" if "number" in name else "Infinity"
        found = by_row[json.dumps(row, sort_keys=True)]
        assert reason in found["reason"], name
        assert found["field"] == found["reason"].partition(":")[0], name


def test_rows_that_do_not_fit_fail_the_job_and_all_others_are_scheduled(
    spark: SparkSession, inbox: Inbox, tmp_path: Path
) -> None:
    channel, folder = inbox.topic(), tmp_path / "rejects"
    rows = rows_of(spark, [{}, {"id": None}])

    with pytest.raises(InboxRejectsError, match=r"1 of 2 rows were rejected, .* for example id: is null") as without:
        inbox.write(rows, channel=channel)
    with pytest.raises(InboxRejectsError, match=f"1 of 2 rows were rejected, .*; see {folder}") as kept:
        inbox.write(rows, channel=channel, rejects=str(folder))

    assert without.value.report.scheduled == 1
    assert kept.value.report.rejects == tuple(str(file) for file in folder.iterdir())
    assert len(ours(inbox.all_records(), channel)) == 2


@pytest.mark.parametrize("policy", ["fail", "keep"])
def test_rows_that_are_others_when_they_are_read_again_fail_the_job_whatever_the_policy(
    spark: SparkSession, inbox: Inbox, tmp_path: Path, policy: str
) -> None:
    channel, folder, is_read = inbox.topic(), tmp_path / "rejects", tmp_path / "is read"
    bad = tuple({**GOOD, "id": None}.values())

    def read(_: Iterator[int]) -> Iterator[tuple[Any, ...]]:
        yield from [bad] if is_read.exists() else [bad, bad]
        is_read.touch()

    with pytest.raises(ConfigurationError, match=r"2 of 2 rows were rejected, .* but 1 when the rows were read again"):
        inbox.write(read_by(spark, read), channel=channel, on_rejects=policy, rejects=str(folder))

    assert len(lines_in(folder)) == 1


@pytest.mark.parametrize("place", ["{tmp_path}/file/rejects", "/proc"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_row_is_sent(
    spark: SparkSession, inbox: Inbox, tmp_path: Path, place: str
) -> None:
    channel = inbox.topic()
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match=r"rejects: .* cannot be written \(.*\); name a place"):
        inbox.write(rows_of(spark, [{}]), channel=channel, rejects=place.format(tmp_path=tmp_path))

    assert ours(inbox.all_records(), channel) == []


def test_rejects_on_the_disks_of_executors_are_missed_and_stay_there(
    spark: SparkSession, inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path means another folder in each process, as a local path does on each machine."""
    channel, name = inbox.topic(), f"rejects-{uuid4().hex}"
    place = Path(spark.sparkContext.parallelize([0], 1).map(lambda _: os.getcwd()).first())
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(ConfigurationError, match=r"\(1 of 2 rows were rejected, and all others are scheduled\)"):
            inbox.write(
                rows_of(spark, [{}, {"id": None}]),
                channel=channel,
                on_rejects="keep",
                rejects=f"/proc/self/cwd/{name}",
            )
        assert len(list((place / name).glob("_staged-*/*.jsonl"))) == 1
    finally:
        shutil.rmtree(place / name, ignore_errors=True)
    assert len(ours(inbox.all_records(), channel)) == 1


def test_writes_at_once_keep_their_rejects_in_one_folder(spark: SparkSession, inbox: Inbox, tmp_path: Path) -> None:
    channel, folder = inbox.topic(), tmp_path / "rejects"
    is_read, is_waiting, is_over = (tmp_path / name for name in ("read", "waiting", "over"))
    slow, quick = (tuple({**GOOD, "id": None, "payload": name}.values()) for name in ("slow", "quick"))

    def read(_: Iterator[int]) -> Iterator[tuple[Any, ...]]:
        yield slow
        if is_read.exists():
            is_waiting.touch()
            deadline = time.monotonic() + 120
            while not is_over.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        is_read.touch()

    keep = {"channel": channel, "on_rejects": "keep", "rejects": str(folder)}
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(inbox.write, read_by(spark, read), **keep)
        wait_for(
            lambda: is_waiting.exists() or writing.done(), what="the slow write has begun its rejects", seconds=120
        )
        own = inbox.write(read_by(spark, lambda _: iter([quick])), **keep)
        is_over.touch()
        other = writing.result(120)

    assert sorted(line["row"]["payload"] for line in lines_in(folder)) == ["quick", "slow"]
    assert sorted(own.rejects + other.rejects) == sorted(str(file) for file in folder.iterdir())


def test_a_past_time_is_delivered_or_rejected_by_policy(spark: SparkSession, inbox: Inbox) -> None:
    channel = inbox.topic()
    past = [{"deliver_at": "2020-01-31T17:00:00Z"}, {"deliver_at": None, "deliver_after": -0.001}]

    assert inbox.write(rows_of(spark, past), channel=channel).scheduled == 2
    with pytest.raises(InboxRejectsError, match=r'deliver_at: has passed; .* or use on_past="deliver"') as failed:
        inbox.write(rows_of(spark, past), channel=channel, on_past="fail")
    assert failed.value.report.rejected == 2


def test_a_channel_that_accepts_less_rejects_what_is_too_large_and_messages_without_key(
    spark: SparkSession, inbox: Inbox
) -> None:
    small = inbox.topic(max_message_bytes=5000, cleanup_policy="compact")
    rows = rows_of(spark, [{"key": "k", "payload": "x" * size} for size in (3000, 4000)] + [{"payload": "x"}])

    with pytest.raises(InboxRejectsError) as failed:
        inbox.write(rows, channel=small)

    assert failed.value.report.scheduled == 1
    assert "payload: 4000 bytes with headers do not fit into the topic, which accepts 5000" in str(failed.value)
    assert f"key: topic '{small}' is compacted and accepts no message without one" in str(failed.value)


def test_rows_may_name_only_the_channels_that_are_given(spark: SparkSession, inbox: Inbox) -> None:
    known, other = inbox.topic(), inbox.topic()
    rows = rows_of(spark, [{"channel": known}, {"channel": other}])

    with pytest.raises(InboxRejectsError, match=f"channel: '{other}' is none of the channels given"):
        inbox.write(rows, channels=[known])
    assert inbox.write(rows).scheduled == 2


# -- jobs that cannot run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("payload string, deliver_at timestamp_ntz", "deliver_at: timestamp_ntz has no time zone; cast it"),
        ("payload string, deliver_at date", "deliver_at: date is not timestamp or string"),
        ("payload string", "deliver_at: the column is missing; add deliver_at"),
        ("deliver_after int", "payload: the column is missing"),
        ("payload string, deliver_after int, retries int", "retries: is not a column of a message; drop or rename it"),
        (
            "payload string, deliver_after int, headers map<string,int>",
            "headers: map<string,int> is not map<string,string>",
        ),
        ("payload string, deliver_after int, priority string", "priority: string is not int"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_any_row_is_read(
    spark: SparkSession, inbox: Inbox, columns: str, problem: str
) -> None:
    read = f.raise_error(f.lit("a row was read"))
    names_and_types = [column.split(maxsplit=1) for column in columns.split(", ")]
    rows = spark.range(1).select(*(read.cast(kind).alias(name) for name, kind in names_and_types))
    with pytest.raises(ConfigurationError, match=problem):
        inbox.write(rows, channel="orders")


def test_a_job_that_lacks_something_says_what(spark: SparkSession, inbox: Inbox, tmp_path: Path) -> None:
    rows = rows_of(spark, [{}])
    with pytest.raises(ConfigurationError, match="rejects: on_rejects='keep' needs a folder"):
        inbox.write(rows, channel="orders", on_rejects="keep")
    with pytest.raises(InvalidMessageError, match="on_rejects: 'drop' is unknown"):
        inbox.write(rows, channel="orders", on_rejects="drop")
    with pytest.raises(InvalidMessageError, match="on_past: 'drop' is unknown"):
        inbox.write(rows, channel="orders", on_past="drop")
    with pytest.raises(ConfigurationError, match="channel: the column is missing; add it, or name one"):
        inbox.write(rows.drop("channel"))
    with pytest.raises(UnknownChannelError, match="has no topic 'nowhere-to-be-found'"):
        inbox.write(rows, channel="nowhere-to-be-found")
    with pytest.raises(InvalidMessageError, match=r"'delay\.v1\.inbox' belongs to a ladder"):
        inbox.write(rows, channel="delay.v1.inbox")
    ledger = tmp_path / "ledger.json"
    ledger.write_text(json.dumps({"stream": {"conn_type": "delay", "extra": {"ledger_url": "sqlite://"}}}))
    with pytest.raises(ConfigurationError, match="connection: it does not keep its messages in Kafka"):
        write_to_inbox(rows, "stream", connection_file=str(ledger), channel="orders")
