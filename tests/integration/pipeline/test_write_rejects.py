"""Rows that cannot be scheduled are written with their reasons, and all others are scheduled."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from tests.integration.pipeline.targets import Target, serving
from tests.kafkas import fresh_topic, require_kafka

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


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """A Kafka connection that accepts payloads of 4000 bytes."""
    with serving("kafka", tmp_path, request) as target:
        file = Path(target.options["connectionFile"])
        connections = json.loads(file.read_text())
        connections[target.options["connection"]]["extra"]["max_payload_bytes"] = 4000
        file.write_text(json.dumps(connections))
        yield target


def row_of(name: str, **values: Any) -> tuple[Any, ...]:
    row = dict.fromkeys(NAMES) | {"id": name, "payload": "p", "deliver_at": LATER.isoformat()} | values
    return tuple(row.values())


def rejects_in(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in sorted(folder.glob("rejects-*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_every_kind_of_bad_row_is_rejected_with_its_reason(spark: SparkSession, target: Target, tmp_path: Path):
    rows = [row_of("good-0"), *(row_of(f"bad-{n}", **bad) for n, (bad, _, _) in enumerate(BAD.values()))]
    rows += [row_of("good-1", headers={"a": "b"}), row_of("good-2", deliver_at=None, deliver_after=1e6)]
    options = {"onPast": "fail", "rejects": str(tmp_path / "rejects"), "report": str(tmp_path / "report.json")}
    target.write(spark.createDataFrame(rows, COLUMNS).coalesce(1), onRejects="keep", **options)

    found = rejects_in(tmp_path / "rejects")
    expected = {name: (field, reason) for name, (_, field, reason) in BAD.items()}
    # In the order of the rows.
    assert [
        (reject["field"], reject["reason"][: len(reason)])
        for reject, (_, reason) in zip(found, expected.values(), strict=True)
    ] == list(expected.values())
    assert found[1]["row"]["deliver_at"] == LATER.isoformat()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows"], report["outcomes"]["scheduled"], report["rejected"]) == (len(rows), 3, len(BAD))
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


def test_without_a_folder_the_failure_says_how_to_get_the_rejects(spark: SparkSession, target: Target):
    with pytest.raises(AnalysisException, match=r"1 of 1 rows were rejected .* name a folder with the option rejects"):
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


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_rejects_of_a_write_that_fails_do_not_appear(spark: SparkSession, target: Target, tmp_path: Path):
    # So large that the writer gets each batch at once.
    rows = spark.createDataFrame([row_of(f"bad-{n}", payload="x" * 20_000) for n in range(30)], COLUMNS).coalesce(1)
    folder = tmp_path / "rejects"

    def fail_once_rejects_are_staged(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        deadline = time.monotonic() + 120
        while not list(folder.glob("_staged-*/*.jsonl")):
            if time.monotonic() > deadline:
                raise TimeoutError("no rejects are staged")
            time.sleep(0.05)
        raise ValueError("the source is broken")

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10")
    try:
        with pytest.raises(PySparkException, match="the source is broken"):
            target.write(rows.mapInArrow(fail_once_rejects_are_staged, COLUMNS), rejects=str(folder))
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert os.listdir(folder) == []
