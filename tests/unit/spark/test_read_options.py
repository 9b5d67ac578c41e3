from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, IsNotNull, LessThan, Not, StringStartsWith

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.datasource.filters import Condition, accepted, earliest, parse_filter
from airflow_delay_provider.spark.datasource.positions import JournalPosition
from airflow_delay_provider.spark.datasource.ranges import split
from airflow_delay_provider.spark.datasource.read_options import OnGap, ReadOptions, Table

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_options_are_read_in_any_case():
    options = ReadOptions.parse(
        {"TABLE": "Journal", "connectionfile": "c.json", "ONGAP": "continue", "partitions": "4"}
    )

    assert (options.table, options.on_gap) == (Table.JOURNAL, OnGap.CONTINUE)
    assert (options.connection_file, options.partitions) == ("c.json", 4)


def test_an_absent_option_is_a_default():
    assert ReadOptions.parse({}) == ReadOptions()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"path": "/data"}, "path: spark.read has no such option; use one of connection, connectionFile"),
        ({"table": "journal", "onGap": "skip"}, "onGap: 'skip' is unknown; use one of fail, continue"),
        ({"partitions": "two"}, "partitions: 'two' is not a number of partitions"),
        ({"table": "journal", "retentionDays": "-1"}, "retentionDays: '-1' is not a number of days"),
        ({"table": "journal", "copied": "yes"}, "copied: 'yes' is neither true nor false"),
        ({"onGap": "fail"}, "onGap: is an option of the journal"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], problem: str):
    with pytest.raises(ConfigurationError) as refused:
        ReadOptions.parse(given)

    assert str(refused.value).startswith(problem)


@pytest.mark.parametrize(
    ("pushed", "condition"),
    [
        (EqualTo(("channel",), "a"), Condition("channel", "in", ("a",))),
        (In(("channel",), ("a", "b")), Condition("channel", "in", ("a", "b"))),
        (GreaterThan(("at",), NOON), Condition("at", ">", (NOON,))),
        (LessThan(("at",), NOON), Condition("at", "<", (NOON,))),
        (EqualTo(("priority",), 1), None),
        (In(("channel",), ("a", None)), None),
        (EqualTo(("headers", "a"), "b"), None),
        # Without a zone it is not known which moment is meant.
        (GreaterThan(("at",), NOON.replace(tzinfo=None)), None),
        (GreaterThan(("lateness_ms",), 5), None),
        (Not(EqualTo(("channel",), "a")), None),
        (StringStartsWith(("channel",), "a"), None),
        (IsNotNull(("channel",)), None),
    ],
    ids=str,
)
def test_filters_that_a_source_can_use_become_conditions(pushed: Filter, condition: Condition | None):
    assert parse_filter(pushed) == condition


def test_conditions_are_all_fulfilled():
    conditions = [
        Condition("change", "in", ("a", "b")),
        Condition("change", "in", ("b", "c")),
        Condition("at", ">", (NOON,)),
        Condition("at", ">=", (NOON + timedelta(hours=1),)),
        Condition("at", "<", (NOON + timedelta(hours=9),)),
    ]

    assert accepted(conditions, "change") == {"b"}
    assert accepted(conditions, "channel") is None
    assert earliest(conditions, "at") == NOON + timedelta(hours=1)
    assert earliest(conditions, "deliver_at") is None


@pytest.mark.parametrize(
    ("start", "end", "pieces", "expected"),
    [
        (0, 10, 3, [(0, 4), (4, 8), (8, 10)]),
        (5, 6, 3, [(5, 6)]),
        (5, 5, 3, []),
        (0, 2_500_000, None, [(0, 833_334), (833_334, 1_666_668), (1_666_668, 2_500_000)]),
    ],
)
def test_ranges_cover_every_number_once(start: int, end: int, pieces: int | None, expected: list[tuple[int, int]]):
    assert [(each.start, each.end) for each in split(start, end, pieces)] == expected


def test_a_position_survives_as_text():
    position = JournalPosition(journal="kafka t x", taken_at_ms=5, numbers=(1, 2))

    assert JournalPosition.parse("after", str(position)) == position
