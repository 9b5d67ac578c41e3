from __future__ import annotations

import json
import os
import pickle
import re
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_delay_provider.domain.exceptions import ConfigurationError, ConflictError, InvalidMessageError
from airflow_delay_provider.spark.datasource.locations import Location
from airflow_delay_provider.spark.datasource.rejects import Reject, RejectsFolder
from tests.unit.spark.datasource.batch import SOON, batch_of

ERROR = InvalidMessageError("message_id", "'' is not a valid id", "use 1-255 printable characters")


def folder_in(path: Path) -> RejectsFolder:
    return RejectsFolder(location=Location.parse("rejects", str(path)), write_id="w1")


def test_a_reject_names_the_column_and_contains_the_row_as_json():
    row = {
        "id": "",
        "payload": b"\xff",
        "deliver_at": SOON,
        "deliver_after": timedelta(minutes=1),
        "headers": [("a", None)],
        "priority": 3,
    }
    batch = batch_of(row, payload=pa.binary(), deliver_after=pa.duration("us"))
    assert json.loads(Reject.of(batch, 0, ERROR).as_line()) == {
        "field": "id",
        "reason": "id: '' is not a valid id; use 1-255 printable characters",
        "row": {
            "id": "",
            "payload_base64": "/w==",
            "deliver_at": "2030-01-01T14:00:00+01:00",
            "deliver_after": 60.0,
            "headers": {"a": None},
            "priority": 3,
        },
    }


def test_values_that_python_cannot_have_are_still_written():
    beyond = pa.array([2**60], pa.int64()).cast(pa.timestamp("us", "UTC"))
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
    batch = pa.record_batch({"deliver_at": beyond, "key": broken})
    row = json.loads(Reject.of(batch, 0, ERROR).as_line())["row"]
    assert row == {"deliver_at": str(2**60), "key_base64": "/w=="}


def test_an_error_without_a_field_is_about_the_id():
    error = ConflictError("order-1", "already exists (SCHEDULED); use another message_id")
    reject = Reject.of(batch_of({"id": "order-1"}), 0, error)
    assert (reject.field, reject.reason) == ("id", str(error))


def test_only_the_parts_of_finished_tasks_are_published(tmp_path: Path):
    folder = folder_in(tmp_path / "rejects")
    reject = Reject.of(batch_of({"id": ""}), 0, ERROR)
    with folder.open_part("00000-1") as done, folder.open_part("00000-2") as lost, folder.open_part("00001-3") as empty:
        done.write([reject, reject])
        lost.write([reject])
        empty.write([])
    assert (done.name, lost.name, empty.name) == ("00000-1.jsonl", "00000-2.jsonl", None)
    assert os.listdir(tmp_path / "rejects") == ["_staged-w1"]
    folder.publish(["00000-1.jsonl"])
    assert os.listdir(tmp_path / "rejects") == ["rejects-w1-00000-1.jsonl"]
    assert len((tmp_path / "rejects/rejects-w1-00000-1.jsonl").read_bytes().splitlines()) == 2


def test_a_failed_write_leaves_no_rejects(tmp_path: Path):
    folder = folder_in(tmp_path)
    with folder.open_part("00000-1") as part:
        part.write([Reject.of(batch_of({"id": ""}), 0, ERROR)])
    folder.discard()
    folder.discard()
    assert os.listdir(tmp_path) == []


def test_rejects_that_cannot_be_published_stay_where_they_are(tmp_path: Path):
    folder = folder_in(tmp_path)
    names = ["00000-1.jsonl", "00001-2.jsonl"]
    for name in names:
        with folder.open_part(name.removesuffix(".jsonl")) as part:
            part.write([Reject.of(batch_of({"id": ""}), 0, ERROR)])
    (tmp_path / "rejects-w1-00001-2.jsonl").mkdir()
    with pytest.raises(ConfigurationError) as failed:
        folder.publish(names)
    assert re.fullmatch(
        rf"rejects: {tmp_path}/_staged-w1/00001-2.jsonl cannot be written \(.+\); .+; rejected rows that are not in"
        rf" {tmp_path} yet stay in {tmp_path}/_staged-w1, so move its files by hand",
        str(failed.value),
    )
    assert (tmp_path / "rejects-w1-00000-1.jsonl").is_file()
    assert os.listdir(tmp_path / "_staged-w1") == ["00001-2.jsonl"]


def test_rejects_on_the_disk_of_another_machine_are_reported(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"rejects: .*00000-1.jsonl is not there, so an executor on another"):
        folder_in(tmp_path).publish(["00000-1.jsonl"])


def test_a_folder_travels_to_executors(tmp_path: Path):
    folder = folder_in(tmp_path)
    assert pickle.loads(pickle.dumps(folder)) == folder


def test_a_relative_path_means_the_same_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert Location.parse("rejects", "here/rejects").text == str(tmp_path / "here/rejects")
    assert Location.parse("rejects", f"file://{tmp_path}/rejects/").text == f"file://{tmp_path}/rejects"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("s3://key:secret@bucket/rejects", "rejects: the URI contains credentials, which Spark would show; leave"),
        ("s3://bucket/rejects?access_key=secret", "rejects: the URI has a query or a fragment; end it with the path"),
        ("gs://bucket/rejects#1", "rejects: the URI has a query or a fragment; end it with the path"),
        ("file:///rejects?", "rejects: the URI has a query or a fragment; end it with the path"),
        ("gopher://host/rejects", "rejects: gopher://host/rejects cannot be used (Unrecognized filesystem type"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused(text: str, sentence: str):
    with pytest.raises(ConfigurationError) as refused:
        Location.parse("rejects", text)
    assert str(refused.value).startswith(sentence)
    assert "secret" not in str(refused.value)


def test_a_path_may_have_any_characters(tmp_path: Path):
    folder = folder_in(tmp_path / "rejects?x=y#1")
    with folder.open_part("00000-1") as part:
        part.write([Reject.of(batch_of({"id": ""}), 0, ERROR)])
    folder.publish(["00000-1.jsonl"])
    assert os.listdir(tmp_path / "rejects?x=y#1") == ["rejects-w1-00000-1.jsonl"]


def test_a_folder_is_prepared_and_left_empty(tmp_path: Path):
    Location.parse("rejects", str(tmp_path / "a/b")).prepare_folder()
    assert os.listdir(tmp_path / "a/b") == []


@pytest.mark.parametrize("place", ["file/rejects", "/proc"])
def test_a_folder_that_cannot_be_written_is_refused(place: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"rejects: .*(/file/rejects|/proc) cannot be written \(.*\); name a"):
        Location.parse("rejects", str(tmp_path / place)).prepare_folder()


def test_a_file_is_prepared_without_a_change_to_one_that_exists(tmp_path: Path):
    (tmp_path / "report").write_text("earlier")
    Location.parse("report", str(tmp_path / "report")).prepare_file()
    Location.parse("report", str(tmp_path / "new/report")).prepare_file()
    assert (tmp_path / "report").read_text() == "earlier"
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("", "report: {} is a folder; name a file"),
        ("file/report", "report: {}/file cannot be written ("),
        ("/proc/report", "report: /proc cannot be written ("),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(place: str, sentence: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError) as refused:
        Location.parse("report", str(tmp_path / place)).prepare_file()
    assert str(refused.value).startswith(sentence.format(tmp_path))
