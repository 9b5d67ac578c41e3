"""Rows that cannot be scheduled are written with their reasons, and all others are scheduled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from tests.integration.pipeline.targets import BROKERS, KNOWS_IDS, Target, serving
from tests.kafkas import fresh_topic, require_kafka
from tools.servers.component import wait_for

LATER = datetime.now(UTC) + timedelta(days=30)
COLUMNS = (
    "id string, channel string, payload string, deliver_at string, deliver_after double, key string,"
    " headers map<string,string>, content_type string, priority int"
)
NAMES = [column.split()[0] for column in COLUMNS.split(", ")]
#: What is wrong with a row, by the column that the reject names and the beginning of its reason.
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no id": ({"id": None}, "id", "id: is missing"),
    "empty id": ({"id": ""}, "id", "id: is missing"),
    "id of two lines": ({"id": "a\nb"}, "id", "id: 'a\\nb' is not a valid id"),
    "bad channel": ({"channel": "two words"}, "channel", "channel: 'two words' is not a valid channel name"),
    "no payload": ({"payload": None}, "payload", "payload: is missing"),
    "large payload": ({"payload": "x" * 5000}, "payload", "payload: 5000 bytes are more than max_payload_bytes (4000)"),
    "naive time": ({"deliver_at": "2030-01-31T17:00:00"}, "deliver_at", "deliver_at: 2030-01-31T17:00:00 has no time"),
    "no time": ({"deliver_at": None}, "deliver_at", "deliver_at: is missing"),
    "both times": ({"deliver_after": 5.0}, "deliver_at", "deliver_at: deliver_after is given, too"),
    "past time": ({"deliver_at": "2020-01-01T00:00:00Z"}, "deliver_at", "deliver_at: 2020-01-01T00:00:00+00:00 has"),
    "no delay": ({"deliver_at": None, "deliver_after": float("nan")}, "deliver_after", "deliver_after: nan is not a"),
    "too far": ({"deliver_at": "2999-01-01T00:00:00Z"}, "deliver_at", "deliver_at: 2999-01-01T00:00:00+00:00 is more"),
    "null header": ({"headers": {"a": None}}, "headers", "headers: 'a': None is not text"),
    "reserved header": ({"headers": {"delay-id": "1"}}, "headers", "headers: 'delay-id' is reserved"),
    "bad key": ({"key": "\0"}, "key", "key: '\\x00' is not text"),
    "long content type": ({"content_type": "x" * 256}, "content_type", "content_type: "),
    "priority": ({"priority": 256}, "priority", "priority: 256 is out of range"),
    "other content": ({"id": "good-0", "payload": "other"}, "id", "id: 'good-0' is also the id of a row with other"),
}


#: The ledger has no headers of its own.
FOR_LEDGER = {kind: bad for kind, bad in BAD.items() if kind != "reserved header"}


@contextmanager
def serving_small(broker: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Target]:
    """A connection that accepts payloads of 4000 bytes."""
    with serving(broker, folder, request) as target:
        file = Path(target.options["connectionFile"])
        connections = json.loads(file.read_text())
        connections[target.options["connection"]]["extra"]["max_payload_bytes"] = 4000
        file.write_text(json.dumps(connections))
        yield target


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    with serving_small("kafka", tmp_path, request) as target:
        yield target


def row_of(name: str, **values: Any) -> tuple[Any, ...]:
    row = dict.fromkeys(NAMES) | {"id": name, "payload": "p", "deliver_at": LATER.isoformat()} | values
    return tuple(row.values())


def rejects_in(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in sorted(folder.glob("rejects-*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("broker", BROKERS)
def test_every_kind_of_bad_row_is_rejected_with_its_reason(
    spark: SparkSession, broker: str, tmp_path: Path, request: pytest.FixtureRequest
):
    kinds = FOR_LEDGER if broker in KNOWS_IDS else BAD
    rows = [row_of("good-0"), *(row_of(f"bad-{n}", **bad) for n, (bad, _, _) in enumerate(kinds.values()))]
    rows += [row_of("good-1", headers={"a": "b"}), row_of("good-2", deliver_at=None, deliver_after=1e6)]
    options = {"onPast": "fail", "rejects": str(tmp_path / "rejects"), "report": str(tmp_path / "report.json")}
    with serving_small(broker, tmp_path, request) as target:
        target.write(spark.createDataFrame(rows, COLUMNS).coalesce(1), onRejects="keep", **options)

    found = rejects_in(tmp_path / "rejects")
    expected = [(field, reason) for _, field, reason in kinds.values()]
    # In the order of the rows.
    assert [
        (reject["field"], reject["reason"][: len(reason)]) for reject, (_, reason) in zip(found, expected, strict=True)
    ] == expected
    assert found[1]["row"]["deliver_at"] == LATER.isoformat()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows"], report["outcomes"]["scheduled"], report["rejected"]) == (len(rows), 3, len(kinds))
    assert report["rejected_by_column"]["id"] == 4
    assert os.listdir(tmp_path / "rejects") == [Path(file).name for file in report["rejects"]]


def test_a_write_with_rejects_fails_at_its_end_and_has_scheduled_the_others(
    spark: SparkSession, target: Target, tmp_path: Path
):
    rows = [row_of(f"good-{n}", deliver_at="2020-01-01T00:00:00Z") for n in range(20)] + [row_of("bad", priority=-1)]
    with pytest.raises(AnalysisException) as failed:
        target.write(spark.createDataFrame(rows, COLUMNS).repartition(3), rejects=str(tmp_path / "rejects"))
    assert (
        "RejectedRowsError: 1 of 21 rows were rejected (priority 1) and all others are scheduled; they are in"
        in str(failed.value)
    )
    assert str(failed.value).rstrip().splitlines()[-2].endswith("The first: priority: -1 is out of range; use 0 to 255")
    [reject] = rejects_in(tmp_path / "rejects")
    assert (reject["row"]["id"], reject["row"]["priority"]) == ("bad", -1)
    assert len(os.listdir(tmp_path / "rejects")) == 1
    assert len(target.received(20)) == 20


@pytest.mark.parametrize("broker", BROKERS)
def test_without_a_folder_the_failure_says_how_to_get_the_rejects(
    spark: SparkSession, broker: str, tmp_path: Path, request: pytest.FixtureRequest
):
    again = "; " if broker in KNOWS_IDS else r" \(a repeated write sends all other rows again, with their ids\); "
    sentence = f"1 of 1 rows were rejected .* name a folder with the option rejects to get all of them{again}correct"
    with serving(broker, tmp_path, request) as target, pytest.raises(AnalysisException, match=sentence):
        target.write(spark.createDataFrame([row_of("bad", priority=-1)], COLUMNS))


def test_what_only_one_channel_refuses_is_found_and_no_other_row_is_sent_twice(
    spark: SparkSession, target: Target, tmp_path: Path
):
    """Kafka's topics have limits of their own."""
    small = fresh_topic(require_kafka(), max_message_bytes=2000)
    due = {"deliver_at": "2020-01-01T00:00:00Z"}
    rows = [row_of(f"good-{n}", **due) for n in range(100)] + [
        row_of("too large", channel=small, payload="x" * 1500, **due),
        row_of("small", channel=small, **due),
    ]
    target.write(spark.createDataFrame(rows, COLUMNS).coalesce(1), rejects=str(tmp_path / "rejects"), onRejects="keep")
    [reject] = rejects_in(tmp_path / "rejects")
    assert (reject["row"]["id"], reject["field"]) == ("too large", "payload")
    assert sorted(message.id for message in target.received(100)) == sorted(f"good-{n}" for n in range(100))


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10")
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def staged_rejects(folder: Path) -> list[Path]:
    """Return the files of rejects that are staged, once there are some."""
    return wait_for(lambda: list(folder.glob("_staged-*/*.jsonl")), what="rejects are staged", seconds=120)


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
@pytest.mark.usefixtures("small_batches")
def test_rejects_of_a_write_that_fails_do_not_appear(spark: SparkSession, target: Target, tmp_path: Path):
    # So large that the writer gets each batch at once.
    rows = spark.createDataFrame([row_of(f"bad-{n}", payload="x" * 20_000) for n in range(30)], COLUMNS).coalesce(1)
    folder = tmp_path / "rejects"

    def fail_once_rejects_are_staged(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        staged_rejects(folder)
        raise ValueError("the source is broken")

    with pytest.raises(PySparkException, match="the source is broken"):
        target.write(rows.mapInArrow(fail_once_rejects_are_staged, COLUMNS), rejects=str(folder))
    assert os.listdir(folder) == []


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
@pytest.mark.usefixtures("small_batches")
def test_rejects_that_cannot_be_published_are_kept_and_named(spark: SparkSession, target: Target, tmp_path: Path):
    due = {"deliver_at": "2020-01-01T00:00:00Z"}
    rows = [row_of(f"bad-{n}", payload="x" * 20_000) for n in range(30)] + [row_of("good", **due)]
    folder = tmp_path / "rejects"

    def take_the_names_of_rejects(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        for staged in staged_rejects(folder):
            (folder / f"rejects-{staged.parent.name.removeprefix('_staged-')}-{staged.name}").mkdir()

    frame = spark.createDataFrame(rows, COLUMNS).coalesce(1).mapInArrow(take_the_names_of_rejects, COLUMNS)
    with pytest.raises(PySparkException) as failed:
        target.write(frame, rejects=str(folder))
    [staged] = staged_rejects(folder)
    assert f"yet stay in {staged.parent}, so move its files by hand; all good rows are scheduled" in str(failed.value)
    assert len(staged.read_text().splitlines()) == 30
    assert [message.id for message in target.received(1)] == ["good"]
