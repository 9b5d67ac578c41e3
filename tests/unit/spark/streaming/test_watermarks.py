from __future__ import annotations

import json
from random import Random

import pytest

from airflow_delay_provider.spark.streaming.watermarks import MANY, Watermarks

INBOX = ("inbox", 0)


def test_records_are_needed_until_all_messages_before_them_are_due():
    marks = Watermarks()
    marks.add(INBOX, 10, 5_000)
    marks.add(INBOX, 20, 1_000)
    marks.add(INBOX, 30, 9_000)
    assert list(marks.at(4_999)) == []
    assert list(marks.at(5_000)) == [("inbox", 0, 20)]
    assert list(marks.at(8_999)) == [("inbox", 0, 20)]
    assert list(marks.at(9_000)) == [("inbox", 0, 30)]


def test_learning_the_same_twice_changes_nothing():
    once, twice = Watermarks(), Watermarks()
    for marks, times in ((once, 1), (twice, 2)):
        for offset, until_ms in ((10, 5_000), (20, 7_000)):
            for _ in range(times):
                marks.add(INBOX, offset, until_ms)
    assert once.to_json() == twice.to_json()


def test_they_survive_json():
    marks = Watermarks()
    marks.add(INBOX, 10, 5_000)
    marks.add(("control", 1), 3, 0)
    again = Watermarks.from_json(json.loads(json.dumps(marks.to_json())))
    assert sorted(again.at(5_000)) == [("control", 1, 3), ("inbox", 0, 10)]


@pytest.mark.parametrize("seed", range(20))
def test_no_waiting_record_is_ever_passed_and_the_table_stays_small(seed: int):
    """Random micro-batches and times, against a list of all records."""
    chance, marks = Random(seed), Watermarks()
    records: list[int] = []
    now_ms = 0
    for _ in range(3 * MANY):
        due = [now_ms + chance.randrange(1, 10 ** chance.randrange(1, 7)) for _ in range(chance.randrange(1, 4))]
        records += due
        marks.add(INBOX, len(records), max(due))
        now_ms += chance.randrange(100)
        for _, _, offset in marks.at(now_ms):
            assert all(each <= now_ms for each in records[:offset])
    assert sum(len(entries) for _, _, entries in marks.to_json()) <= MANY
    assert list(marks.at(max(records))) == [("inbox", 0, len(records))]
