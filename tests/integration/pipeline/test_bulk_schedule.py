"""The bulk schedule job: files in every format, names of one's own, rejects, reports and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from sqlalchemy.engine import make_url

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.jobs import BULK_SCHEDULE
from airflow_delay_provider.spark.jobs.bulk_schedule import main
from tests.acceptance.kafka_soak import read_to_end
from tests.databases import fresh_database
from tests.integration.pipeline.targets import CONN_ID, serving
from tests.kafkas import connection_of, delete_ladder, fresh_topic, require_kafka
from tests.sparks import CONF
from tools.servers.kafka import free_ports
from tools.servers.spark import SparkCluster, client_environment

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("spark")]

DUE = datetime(2031, 1, 31, 17, tzinfo=UTC)


class Scheduling:
    """A ledger of its own, and the job with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db")
        self.connections = folder / "connections.json"
        extra = {"ledger_url": f"sqlite:///{folder}/ledger.db", "max_payload_bytes": 100}
        self.connections.write_text(json.dumps({"delay_default": {"conn_type": "delay", "extra": json.dumps(extra)}}))

    def run(self, *arguments: object) -> int:
        """Return the exit code."""
        usual = ("--connection-file", self.connections, "--report", self.folder / "report")
        # Of two reports, the last one counts.
        return main([str(each) for each in (*usual, *arguments)])

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "report").read_text())
        return report

    def messages(self) -> dict[str, Message]:
        """All messages by their payload."""
        with self.ledger.read() as connection:
            ids = [record.message.id for record in listing.page(connection).records]
            found = [listing.get(connection, message_id).message for message_id in ids]
        return {message.payload.decode(errors="replace"): message for message in found}

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def rejects(self, folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path) -> Scheduling:
    return Scheduling(tmp_path)


# -- formats -----------------------------------------------------------------------------------------------------------


def as_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows))


def test_a_parquet_file_with_names_of_its_own_is_scheduled(job: Scheduling) -> None:
    rows = [{"order": n, "due_time": DUE + timedelta(hours=n), "text": f"order {n}", "internal": n} for n in range(3)]
    pq.write_table(as_table(rows), job.folder / "orders.parquet")
    code = job.run(
        *("--input", job.folder / "orders.parquet", "--channel", "orders", "--ignore-other-columns", "--priority", 4),
        *("--column", "deliver_at=due_time", "--column", "payload=text", "--column", "id=order"),
    )
    assert code == 0
    found = job.messages()
    assert {(each.id, each.deliver_at) for each in found.values()} == {
        (str(row["order"]), row["due_time"]) for row in rows
    }
    assert {(each.channel, each.priority) for each in found.values()} == {("orders", 4)}
    assert job.report["rows"] == 3
    assert job.report["outcomes"]["scheduled"] == 3
    assert job.report["seconds"] > 0
    assert job.report["rows_per_second"] > 0


def test_json_lines_keep_their_values_and_rows_without_a_time_get_one(job: Scheduling) -> None:
    lines = [
        {
            "id": "a",
            "payload": "one",
            "deliver_at": "2031-01-31T18:00:00+01:00",
            "headers": {"tenant": "x"},
            "priority": 7,
        },
        {"id": "b", "payload": {"order": 2, "items": [1, 2]}, "channel": "special", "key": "k"},
        {"id": "c", "payload": "three", "deliver_after": 86400},
        {"id": "d", "payload": "four", "deliver_after": "90.5"},
    ]
    path = job.write("messages.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    assert job.run("--input", path, "--channel", "usual", "--deliver-at", "2031-02-01T00:00:00Z") == 0
    found = {message.id: message for message in job.messages().values()}
    assert (found["a"].deliver_at, dict(found["a"].headers), found["a"].priority) == (DUE, {"tenant": "x"}, 7)
    assert (found["b"].channel, found["b"].key, json.loads(found["b"].payload)) == ("special", "k", lines[1]["payload"])
    assert found["b"].deliver_at == datetime(2031, 2, 1, tzinfo=UTC)
    later = found["c"].deliver_at - found["d"].deliver_at
    assert timedelta(days=1) - timedelta(minutes=5) < later < timedelta(days=1)


def test_csv_keeps_commas_quotes_and_json_in_cells(job: Scheduling) -> None:
    due = "2031-01-31T17:00:00Z"
    text = f'payload,due,headers,priority\n"a, ""b""",{due},"{{""tenant"": ""x""}}",3\nplain,{due},,\n'
    path = job.write("messages.csv", text)
    assert job.run("--input", path, "--column", "deliver_at=due", "--channel", "c") == 0
    found = job.messages()
    assert {payload: dict(each.headers) for payload, each in found.items()} == {'a, "b"': {"tenant": "x"}, "plain": {}}
    assert found['a, "b"'].priority == 3


def test_a_table_and_orc_files_are_scheduled_and_a_payload_is_computed(job: Scheduling, spark: SparkSession) -> None:
    rows = spark.createDataFrame([(1, "anna"), (2, "bert")], "number int, name string")
    rows.createOrReplaceTempView("customers")
    rows.write.orc(str(job.folder / "customers"))
    computed = ("--expression", "payload=to_json(struct(number, name))", "--deliver-after", 3600, "--channel", "c")
    assert job.run("--table", "customers", *computed) == 0
    assert set(job.messages()) == {'{"number":1,"name":"anna"}', '{"number":2,"name":"bert"}'}
    assert job.run("--input", job.folder / "customers", "--format", "orc", *computed) == 0
    assert job.report["outcomes"] == {**job.report["outcomes"], "scheduled": 0, "kept": 2}


# -- times without a zone ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["America/St_Johns", "Asia/Kathmandu"])
def session_zone(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[str]:
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.set("spark.sql.session.timeZone", "UTC")


BERLIN = "deliver_at=try_to_timestamp(concat(due, ' Europe/Berlin'))"


@pytest.mark.usefixtures("session_zone")
def test_the_documented_expression_names_the_zone_of_text_in_any_session_zone(job: Scheduling) -> None:
    assert BERLIN in (Path(__file__).parents[3] / "docs/pipeline.md").read_text()
    # In winter, in summer, and with the T of ISO-8601; the others are no times of this zone.
    times = ["2031-01-31 18:00:00", "2031-07-31 19:00:00.5", "2031-01-31T18:00:00", "2031-01-31T18:00:00Z", "soon", ""]
    path = job.write("rows.csv", "payload,due\n" + "".join(f"row {n},{due}\n" for n, due in enumerate(times)))
    folder = job.folder / "rejects"
    assert job.run("--input", path, "--expression", BERLIN, "--channel", "c", "--rejects", folder) == 3
    assert {payload: message.deliver_at for payload, message in job.messages().items()} == {
        "row 0": DUE,
        "row 1": datetime(2031, 7, 31, 17, 0, 0, 500_000, tzinfo=UTC),
        "row 2": DUE,
    }
    assert sorted((line["row"]["payload"], line["field"]) for line in job.rejects(folder)) == [
        (f"row {n}", "deliver_at") for n in (3, 4, 5)
    ]


@pytest.mark.usefixtures("session_zone")
def test_the_documented_expression_names_the_zone_of_timestamps_in_any_session_zone(job: Scheduling) -> None:
    pq.write_table(
        as_table([{"payload": "row", "due": DUE.replace(hour=18, tzinfo=None)}]), job.folder / "rows.parquet"
    )
    assert job.run("--input", job.folder / "rows.parquet", "--expression", BERLIN, "--channel", "c") == 0
    assert job.messages()["row"].deliver_at == DUE


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_the_same_rows_again_are_the_same_messages_and_another_prefix_makes_new_ones(job: Scheduling) -> None:
    path = job.write("messages.jsonl", '{"payload": "one"}\n{"payload": "two"}\n')
    arguments = ("--input", path, "--channel", "c", "--deliver-after", 3600, "--id-prefix")
    assert [job.run(*arguments, prefix) for prefix in ("monday", "monday", "tuesday")] == [0, 0, 0]
    assert job.report["outcomes"]["scheduled"] == 2
    with job.ledger.read() as connection:
        assert len(listing.page(connection).records) == 4


# -- rejects -----------------------------------------------------------------------------------------------------------

BAD = [
    {"id": "good", "payload": "good", "deliver_at": "2031-01-31T17:00:00Z"},
    {"payload": "no id", "deliver_at": "2031-01-31T17:00:00Z"},
    {"id": "naive", "payload": "naive", "deliver_at": "2031-01-31T17:00:00"},
    {"id": "large", "payload": "x" * 101, "deliver_at": "2031-01-31T17:00:00Z"},
    {"id": "past", "payload": "past", "deliver_at": "2001-01-31T17:00:00Z"},
    {"id": "headers", "payload": "headers", "deliver_at": "2031-01-31T17:00:00Z", "headers": ["x"]},
    {"id": "delay", "payload": "delay", "deliver_after": "soon"},
    {"id": "priority", "payload": "priority", "deliver_after": 60, "priority": "high"},
]
FIELDS = ["deliver_after", "deliver_at", "deliver_at", "headers", "id", "payload", "priority"]


@pytest.fixture
def bad(job: Scheduling) -> Path:
    return job.write("bad.jsonl", "".join(f"{json.dumps(line)}\n" for line in BAD))


def test_bad_rows_end_with_code_3_and_all_others_are_scheduled(
    job: Scheduling, bad: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = job.folder / "rejects"
    code = job.run("--input", bad, "--channel", "c", "--on-past", "fail", "--rejects", folder)
    assert code == 3
    assert set(job.messages()) == {"good"}
    assert sorted(line["field"] for line in job.rejects(folder)) == FIELDS
    assert all(line["reason"] and line["row"] for line in job.rejects(folder))
    assert (job.report["rows"], job.report["rejected"]) == (8, 7)
    said = capfd.readouterr()
    assert "bulk_schedule: error: --on-rejects: 7 of 8 rows were rejected" in said.err
    assert "bulk_schedule: 8 rows: 1 scheduled, 7 rejected (" in said.out
    assert "\tat org.apache" not in said.err


def test_rejects_that_are_kept_are_a_success_and_can_be_corrected_and_scheduled_again(
    job: Scheduling, bad: Path
) -> None:
    folder = job.folder / "rejects"
    assert job.run("--input", bad, "--channel", "c", "--rejects", folder, "--on-rejects", "keep") == 0
    wrong = {line["row"].get("id"): line for line in job.rejects(folder)}
    assert wrong["naive"]["row"]["deliver_at"] == "2031-01-31T17:00:00"
    corrected = [line for line in job.rejects(folder) if line["row"].get("id") in ("naive", "delay")]
    for line in corrected:
        line["row"] |= {"deliver_at": "2031-01-31T17:00:00Z", "deliver_after": None}
    again = job.write("again.jsonl", "".join(f"{json.dumps(line)}\n" for line in corrected))
    assert job.run("--input", again, "--channel", "c") == 0
    assert {"good", "naive", "delay"} <= set(job.messages())


def test_rejected_bytes_survive_the_rejects_folder(job: Scheduling) -> None:
    rows = [{"payload": b"\xff\x00binary", "when": None}]
    pq.write_table(
        pa.Table.from_pylist(rows, schema=pa.schema([("payload", pa.binary()), ("when", pa.string())])),
        job.folder / "b.parquet",
    )
    folder = job.folder / "rejects"
    arguments = ("--channel", "c", "--rejects", folder)
    assert job.run("--input", job.folder / "b.parquet", "--column", "deliver_at=when", *arguments) == 3
    assert job.run("--input", folder, "--format", "json", "--deliver-after", 60, *arguments) == 0
    assert [message.payload for message in job.messages().values()] == [b"\xff\x00binary"]


def test_a_dry_run_counts_the_same_rejects_and_writes_nothing(
    job: Scheduling, bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--input", bad, "--channel", "c", "--on-past", "fail", "--dry-run")
    assert job.run(*arguments, "--rejects", job.folder / "rejects") == 3
    assert (job.report["rows"], job.report["rejected"], sum(job.report["outcomes"].values())) == (8, 7, 0)
    assert not (job.folder / "rejects").exists()
    assert job.messages() == {}
    assert "1 can be scheduled, 7 rejected" in capsys.readouterr().out
    assert job.run(*arguments, "--on-rejects", "keep") == 0


def test_without_a_ledger_nobody_is_told_to_send_all_rows_again(
    job: Scheduling, bad: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with serving("rabbitmq", tmp_path, request) as target:
        connection = ("--connection", CONN_ID, "--connection-file", target.options["connectionFile"])
        assert job.run("--input", bad, "--channel", target.channel, *connection) == 3
    assert "if your consumers ignore repeated ids: this broker does not know ids" in capfd.readouterr().err
    assert job.run("--input", bad, "--channel", "c") == 3
    assert "; give --rejects FOLDER to get all of them, and schedule the same input again" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_a_report_that_cannot_be_written_at_the_end_says_that_the_rows_are_scheduled(
    job: Scheduling, spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    report = job.folder / "report"

    def take_the_name_of_the_report(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        report.mkdir()

    rows = spark.sql("SELECT 'one' AS payload").coalesce(1)
    rows.mapInArrow(take_the_name_of_the_report, "payload string").createOrReplaceTempView("rows_of_a_long_job")
    assert job.run("--table", "rows_of_a_long_job", "--channel", "c", "--deliver-after", 3600) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(f"bulk_schedule: error: --report: {report} cannot be written (")
    assert last.endswith("; all good rows are scheduled, so do not schedule them again")
    assert set(job.messages()) == {"one"}


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def good(job: Scheduling) -> Path:
    return job.write("good.jsonl", '{"payload": "one", "due": "2031-01-31T17:00:00Z"}\n')


MISTAKES: dict[str, tuple[Sequence[str], str]] = {
    "a file that is not there": (
        ["--input", "/nowhere/orders.parquet"],
        "--input: /nowhere/orders.parquet does not exist; ",
    ),
    "a table that is not there": (["--table", "nothing_here"], "--table: nothing_here does not exist; "),
    "a format that nothing tells": (["--input", "GOOD.dat"], "--format: "),
    "a format that Spark does not know": (
        ["--input", "GOOD", "--format", "protobuffer"],
        "--format: Spark does not know 'protobuffer'; ",
    ),
    "a file of another format": (["--input", "GOOD", "--format", "parquet"], "--input: "),
    "a column that is no part of a message": (["--input", "GOOD"], "--column: due: no part of a message; "),
    "a source that is not there": (
        ["--input", "GOOD", "--column", "deliver_at=when"],
        "--column: the input has no column 'when'; use one of ",
    ),
    "a target that is not there": (["--input", "GOOD", "--column", "when=due"], "--column: when is no column"),
    "an expression that Spark does not understand": (
        ["--input", "GOOD", "--expression", "payload=upper(nothing)"],
        "--expression: ",
    ),
    "no times": (
        ["--input", "GOOD", "--ignore-other-columns", "--channel", "c"],
        "deliver_at: the column is missing; ",
    ),
    "no channel": (["--input", "GOOD", "--column", "deliver_at=due"], "channel: the column is missing; "),
    "an input and a table": (["--input", "GOOD", "--table", "t"], "--input: give either --input or --table; "),
    "rejects that would be lost": (["--input", "GOOD", "--on-rejects", "keep"], "--rejects: is missing"),
    "a report that cannot be written": (
        ["--input", "GOOD", "--column", "deliver_at=due", "--channel", "c", "--report", "GOOD/report"],
        "--report: GOOD cannot be written (",
    ),
    "a report that is a folder": (
        ["--input", "GOOD", "--column", "deliver_at=due", "--channel", "c", "--report", "/"],
        "--report: / is a folder; ",
    ),
    "a rejects folder that cannot be written": (
        ["--input", "GOOD", "--column", "deliver_at=due", "--channel", "c", "--rejects", "/proc"],
        "rejects: /proc cannot be written (",
    ),
    "a connection that is not there": (
        ["--input", "GOOD", "--column", "deliver_at=due", "--channel", "c", "--connection", "orders"],
        "connectionFile: ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_that_names_the_option_and_schedules_nothing(
    mistake: str, job: Scheduling, good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = MISTAKES[mistake]
    assert job.run(*(each.replace("GOOD", str(good)) for each in arguments)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("bulk_schedule: ")] == [lines[-1]]
    assert lines[-1].startswith(f"bulk_schedule: error: {sentence.replace('GOOD', str(good))}"), lines
    assert "; " in lines[-1]
    assert not [line for line in lines if "\tat " in line or "Traceback" in line]
    assert job.messages() == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [("broken.jsonl", '{"payload": "one"}\n{"payload": \n'), ("broken.csv", "payload,deliver_after\none,1\ntwo,2,3\n")],
)
def test_a_line_that_cannot_be_parsed_is_shown_and_nothing_is_scheduled(
    name: str, text: str, job: Scheduling, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run("--input", job.write(name, text), "--channel", "c", "--deliver-after", 5) == 2
    assert "bulk_schedule: error: --input: a line cannot be parsed: " in capsys.readouterr().err
    assert job.messages() == {}


def test_a_broker_that_is_down_fails_the_job_with_code_1(
    job: Scheduling, good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = {"conn_type": "rabbitmq", "host": "127.0.0.1", "port": 1}
    job.connections.write_text(json.dumps({"delay_default": extra}))
    assert job.run("--input", good, "--column", "deliver_at=due", "--channel", "c") == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("bulk_schedule: failed: ")
    assert "127.0.0.1" in lines[-1]
    assert not [line for line in lines if "\tat " in line or "Traceback" in line]


@pytest.mark.parametrize("arguments", [["--no-such-option"], ["--input", "x", "--priority", "high"]])
def test_arguments_that_cannot_be_parsed_end_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


# -- Spark's own Kafka sink --------------------------------------------------------------------------------------------


class Streaming(Scheduling):
    """A ladder of its own instead of the ledger, to which the job writes through Spark's own sink."""

    def __init__(self, folder: Path, broker: KafkaBroker, bootstrap: str, connection: dict[str, Any]) -> None:
        super().__init__(folder)
        self.broker, self.bootstrap = broker, bootstrap
        self.channel = fresh_topic(bootstrap)
        self.connections.write_text(json.dumps({"stream": connection}))

    def run(self, *arguments: object, via: str = "kafka-sink") -> int:
        return super().run(*arguments, "--channel", self.channel, "--connection", "stream", "--via", via)

    def values(self) -> list[bytes]:
        """Return the payloads in the inbox."""
        return sorted(record.value() or b"" for record in read_to_end(self.bootstrap, [self.broker.topology.inbox]))


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Streaming]:
    bootstrap = require_kafka()
    settings = {"ladder": f"bulk-{uuid4().hex[:8]}", "partitions": 2, "max_payload_bytes": 100}
    with KafkaBroker(KafkaConfig.from_settings(settings, host=bootstrap)) as broker:
        broker.create_topology()
        yield Streaming(tmp_path, broker, bootstrap, connection_of(bootstrap, **settings))
        delete_ladder(broker)


def test_rows_go_through_the_kafka_sink_with_the_same_counts_and_exit_codes(stream: Streaming) -> None:
    rows = [{"payload": f"row {n}" if n else "x" * 101, "due": DUE} for n in range(20)]
    pq.write_table(as_table(rows), stream.folder / "rows.parquet")
    folder = stream.folder / "rejects"
    arguments = ["--input", stream.folder / "rows.parquet", "--column", "deliver_at=due", "--rejects", folder]
    assert stream.run(*arguments) == 3
    assert stream.values() == sorted(b"row %d" % n for n in range(1, 20))
    report = stream.report
    assert (report["rows"], report["outcomes"], report["rejected"]) == (20, {"scheduled": 19}, 1)
    assert report["rejects"] == [str(file) for file in folder.iterdir()]
    assert stream.run(*arguments, "--on-conflict", "replace") == 2


def test_rejects_of_several_writes_by_either_way_are_corrected_and_scheduled_from_one_folder(stream: Streaming) -> None:
    folder = stream.folder / "rejects"
    for n, via in enumerate(["kafka-sink", "kafka-sink", "data-source"]):
        path = stream.folder / f"{n}.parquet"
        schema = pa.schema([("payload", pa.binary()), ("deliver_at", pa.string()), ("priority", pa.int32())])
        pq.write_table(pa.Table.from_pylist([{"payload": b"\xff%d" % n, "priority": 3}], schema=schema), path)
        assert stream.run("--input", path, "--rejects", folder, "--on-rejects", "keep", via=via) == 0
    assert [line["field"] for line in stream.rejects(folder)] == ["deliver_at"] * 3
    assert stream.values() == []
    for file in folder.iterdir():
        [line] = [json.loads(line) for line in file.read_text().splitlines()]
        line["row"]["deliver_at"] = "2031-01-31T17:00:00Z"
        file.write_text(f"{json.dumps(line)}\n")

    assert stream.run("--input", folder, "--format", "json", via="data-source") == 0

    assert stream.report["outcomes"]["scheduled"] == 3
    # The data source writes records in a form of its own, whose end is the payload.
    assert sorted(value[-2:] for value in stream.values()) == [b"\xff0", b"\xff1", b"\xff2"]


def test_rejects_that_are_not_all_written_down_are_no_success(
    stream: Streaming, spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    is_read = stream.folder / "is read"

    def read(_: Iterator[int]) -> Iterator[tuple[str, int, str | None]]:
        yield from [("x", 60, None)] * (1 if is_read.exists() else 2)
        is_read.touch()

    rows = spark.sparkContext.parallelize([0], 1).mapPartitions(read)
    spark.createDataFrame(rows, "payload string, deliver_after int, id string").createOrReplaceTempView("changing")
    assert stream.run("--table", "changing", "--rejects", stream.folder / "rejects", "--on-rejects", "keep") == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("bulk_schedule: error: rejects: 2 of 2 rows were rejected")
    assert "but 1 when the rows were read again" in last


def test_a_rejects_folder_that_cannot_be_written_schedules_nothing_through_the_kafka_sink(
    stream: Streaming, capfd: pytest.CaptureFixture[str]
) -> None:
    good = stream.write("good.jsonl", '{"payload": "one", "due": "2031-01-31T17:00:00Z"}\n')
    assert stream.run("--input", good, "--column", "deliver_at=due", "--rejects", good / "rejects") == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"bulk_schedule: error: rejects: {good}/rejects")
    assert stream.values() == []


def test_a_kafka_that_is_down_fails_the_job_of_the_kafka_sink_with_code_1(
    job: Scheduling, good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [port] = free_ports(1)
    job.connections.write_text(json.dumps({"stream": connection_of(f"127.0.0.1:{port}")}))
    arguments = ("--connection", "stream", "--via", "kafka-sink", "--column", "deliver_at=due", "--channel", "c")
    assert job.run("--input", good, *arguments) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("bulk_schedule: ")] == [lines[-1]]
    assert lines[-1].startswith("bulk_schedule: failed: ")
    assert f"127.0.0.1:{port}" in lines[-1]
    assert not [line for line in lines if "\tat " in line or "Traceback" in line]


# -- what is missing on the machine ------------------------------------------------------------------------------------


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    module = "airflow_delay_provider.spark.jobs.bulk_schedule"
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_its_connector_the_kafka_sink_says_where_to_get_it(good: Path) -> None:
    """In a process of its own: the session of these tests has the connector."""
    arguments = ["--input", str(good), "--column", "deliver_at=due", "--channel", "c", "--via", "kafka-sink"]
    ended = in_a_process(*arguments, **client_environment())
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(
        "bulk_schedule: error: spark.jars: Spark cannot use its Kafka connector: "
    )
    assert "Traceback" not in ended.stderr


def test_help_needs_no_spark() -> None:
    ended = in_a_process("--help", PATH="/nowhere", JAVA_HOME="")
    assert ended.returncode == 0
    assert "exit codes: 0 all rows are scheduled" in ended.stdout


# -- on a cluster ------------------------------------------------------------------------------------------------------


def test_a_cluster_schedules_a_file_and_shows_the_secret_of_its_connection_nowhere(
    cluster: SparkCluster, tmp_path: Path
) -> None:
    with fresh_database() as url, closing(Ledger(url)) as ledger:
        ledger.migrate()
        pq.write_table(as_table([{"payload": f"row {n}", "due": DUE} for n in range(500)]), tmp_path / "rows.parquet")
        (tmp_path / "events").mkdir()
        # The server trusts its clients, and so takes any password.
        with_password = make_url(url).set(password="planted-s3cret").render_as_string(hide_password=False)
        extra = {"ledger_url": with_password, "max_payload_bytes": 6}
        connection = {"conn_type": "delay", "password": "planted-s3cret", "extra": extra}
        settings = {**CONF, "spark.eventLog.enabled": "true", "spark.eventLog.dir": (tmp_path / "events").as_uri()}
        command = ["spark-submit", "--master", cluster.url]
        command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command += [BULK_SCHEDULE, "--input", str(tmp_path / "rows.parquet"), "--column", "deliver_at=due"]
        command += [
            "--channel",
            "c",
            "--connection",
            "orders",
            "--partitions",
            "4",
            "--report",
            str(tmp_path / "report"),
        ]
        ended = subprocess.run(
            [*command, "--rejects", str(tmp_path / "rejects")],
            env={**os.environ, **client_environment(), "AIRFLOW_CONN_ORDERS": json.dumps(connection)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        with ledger.read() as reading:
            assert listing.count_by_state(reading, channel="c")[State.SCHEDULED] == 100
    assert ended.returncode == 3, ended.stderr[-3000:]
    assert json.loads((tmp_path / "report").read_text())["rejected"] == 400
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.parts[len(tmp_path.parts)] for file in written} >= {"events", "rejects", "report"}
    shown = [ended.stdout, ended.stderr, *(file.read_text(errors="replace") for file in written)]
    assert any("SparkListenerApplicationStart" in text for text in shown), "the event log can be read"
    assert [text[:200] for text in shown if "planted-s3cret" in text] == []
