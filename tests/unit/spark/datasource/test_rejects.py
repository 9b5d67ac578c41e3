from __future__ import annotations

import json
import os
import pickle
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
        ("gopher://host/rejects", "rejects: gopher://host/rejects cannot be used (Unrecognized filesystem type"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused(text: str, sentence: str):
    with pytest.raises(ConfigurationError) as refused:
        Location.parse("rejects", text)
    assert str(refused.value).startswith(sentence)
    assert "secret" not in str(refused.value)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"rejects: .*/file/rejects cannot be written \(.*\); name a place"):
        Location.parse("rejects", str(tmp_path / "file/rejects")).make_folder()
