from __future__ import annotations

import pytest
from pyspark.sql import types as t

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.datasource.schema import check_schema

TEXT, BINARY, INT, TIMESTAMP = t.StringType(), t.BinaryType(), t.IntegerType(), t.TimestampType()
DELAYED = [("payload", TEXT), ("deliver_after", INT)]
Columns = list[tuple[str, t.DataType]]


def check(columns: Columns, *, channel: str | None = None) -> None:
    check_schema(t.StructType([t.StructField(name, kind) for name, kind in columns]), channel=channel)


@pytest.mark.parametrize(
    "columns",
    [
        [
            *((name, TEXT) for name in ("id", "channel", "key", "content_type")),
            ("payload", BINARY),
            ("deliver_at", TIMESTAMP),
            ("deliver_after", t.DoubleType()),
            ("headers", t.MapType(TEXT, TEXT)),
            ("priority", INT),
        ],
        [("payload", TEXT), ("channel", TEXT), ("deliver_at", TEXT)],
        [("payload", t.VarcharType(10)), ("channel", t.CharType(3)), ("deliver_after", t.DayTimeIntervalType())],
        [("payload", TEXT), ("channel", TEXT), ("deliver_after", t.LongType()), ("priority", t.ByteType())],
        [("payload", TEXT), ("channel", TEXT), ("deliver_after", t.DecimalType(10, 3))],
    ],
)
def test_columns_of_messages_fit(columns: Columns):
    check(columns)


def test_a_channel_for_all_rows_replaces_the_column():
    check(DELAYED, channel="orders")


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ([*DELAYED, ("due", TIMESTAMP)], "due: is not a column of a message; drop or rename it: the columns are id,"),
        ([*DELAYED, ("ID", TEXT)], "ID: is not a column of a message"),
        ([("payload", t.StructType([])), ("deliver_after", INT)], "payload: struct<> is not string or binary; convert"),
        ([("payload", TEXT), ("deliver_at", t.DateType())], "deliver_at: date is not timestamp or string"),
        (
            [("payload", TEXT), ("deliver_at", t.TimestampNTZType())],
            "deliver_at: timestamp_ntz has no time zone; cast it to timestamp, with spark.sql",
        ),
        ([("payload", TEXT), ("deliver_after", TEXT)], "deliver_after: string is not a number (of seconds) or"),
        ([("payload", TEXT), ("deliver_after", t.YearMonthIntervalType())], "deliver_after: interval year to month is"),
        ([*DELAYED, ("id", t.LongType())], "id: bigint is not string; cast the column"),
        ([*DELAYED, ("priority", t.DoubleType())], "priority: double is not int; cast the column"),
        ([*DELAYED, ("headers", t.MapType(TEXT, INT))], "headers: map<string,int> is not map<string,string>; convert"),
        ([("deliver_after", INT)], "payload: the column is missing; add one of type string or binary"),
        ([("payload", TEXT)], "deliver_at: the column is missing; add deliver_at (timestamp) or deliver_after"),
        (DELAYED, 'channel: the column is missing; add it, or name one channel for all rows with .option("channel"'),
        ([*DELAYED, ("payload", TEXT)], "payload: 2 columns have this name; drop or rename the others"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(columns: Columns, sentence: str):
    with pytest.raises(ConfigurationError) as refused:
        check(columns)
    assert str(refused.value).startswith(sentence)
