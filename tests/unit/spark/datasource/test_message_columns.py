from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from airflow_delay_provider.domain.arguments import OnPast
from airflow_delay_provider.domain.message import Message
from tests.unit.spark.datasource.batch import NOW, SOON, read

MS, US = timedelta(milliseconds=1), timedelta(microseconds=1)


def test_a_row_becomes_the_message_with_its_values():
    row = {
        "id": "order-1",
        "channel": "invoices",
        "payload": '{"n": 1}',
        "deliver_at": SOON,
        "key": "customer-7",
        "headers": [("trace", "abc"), ("empty", "")],
        "content_type": "application/json",
        "priority": 255,
    }
    [message] = read(row).messages
    assert message == Message(
        id="order-1",
        channel="invoices",
        payload=b'{"n": 1}',
        deliver_at=SOON,
        key="customer-7",
        headers={"trace": "abc", "empty": ""},
        content_type="application/json",
        priority=255,
    )


@pytest.mark.parametrize("large", [False, True])
def test_text_and_binary_payloads_have_the_content_types_of_the_hook(large: bool):
    text = read({"payload": "grün"}, types={"payload": pa.large_string() if large else pa.string()})
    binary = read({"payload": b"\xff\x00"}, types={"payload": pa.large_binary() if large else pa.binary()})
    assert [(each.payload, each.content_type) for each in (*text.messages, *binary.messages)] == [
        ("grün".encode(), "text/plain; charset=utf-8"),
        (b"\xff\x00", "application/octet-stream"),
    ]


def test_nulls_are_the_defaults():
    row = {"id": "1", "key": None, "headers": None, "content_type": None, "priority": None, "channel": None}
    [message] = read(row, row | {"id": "2", "key": "k", "headers": [("a", "b")], "priority": 3}).messages[:1]
    assert (message.channel, message.key, message.headers, message.priority) == ("orders", None, {}, 0)


@pytest.mark.parametrize(
    ("row", "types", "due"),
    [
        ({"deliver_at": SOON}, {}, SOON),
        ({"deliver_at": SOON + US}, {}, SOON + MS),
        # A time that has passed is not rounded up: it could be in the future then.
        ({"deliver_at": NOW - 1500 * US}, {}, NOW - 2 * MS),
        ({"deliver_at": NOW}, {}, NOW),
        ({"deliver_at": "2030-01-01T14:00:00+01:00"}, {"deliver_at": pa.string()}, SOON),
        ({"deliver_at": "2030-01-01T13:00:00.000001Z"}, {"deliver_at": pa.string()}, SOON + MS),
        ({"deliver_after": 1.5}, {}, NOW + 1500 * MS),
        ({"deliver_after": 90}, {"deliver_after": pa.int64()}, NOW + timedelta(seconds=90)),
        ({"deliver_after": Decimal("0.25")}, {"deliver_after": pa.decimal128(10, 2)}, NOW + 250 * MS),
        ({"deliver_after": timedelta(days=1)}, {"deliver_after": pa.duration("us")}, NOW + timedelta(days=1)),
        ({"deliver_after": -60.0}, {}, NOW - timedelta(minutes=1)),
    ],
)
def test_due_times_are_exact_to_the_millisecond_and_never_early(
    row: dict[str, Any], types: dict[str, pa.DataType], due: datetime
):
    [message] = read(row, types=types).messages
    assert message.deliver_at == due
    assert message.deliver_at.tzinfo is UTC


def test_a_row_may_have_the_one_time_and_the_next_row_the_other():
    rows = read({"deliver_at": SOON, "deliver_after": None}, {"deliver_at": None, "deliver_after": 3600.0})
    assert [message.deliver_at for message in rows.messages] == [SOON, SOON]


BINARY_TEXT = pa.binary()


@pytest.mark.parametrize(
    ("bad", "options", "sentence"),
    [
        ({"id": None}, {}, "id: is missing; give the row one, or drop the column"),
        ({"id": ""}, {}, "id: is missing"),
        ({"id": "a\nb"}, {}, "message_id: 'a\\nb' is not a valid id"),
        ({"id": "x" * 256}, {}, "message_id: 'xxx"),
        ({"channel": None}, {"channel": None}, "channel: is missing; give the row one, or set the option channel"),
        ({"channel": "two words"}, {}, "channel: 'two words' is not a valid channel name"),
        ({"payload": None}, {}, "payload: is missing"),
        ({"deliver_at": None}, {}, "deliver_at: is missing; give the row a time, or a delay in deliver_after"),
        ({"deliver_after": 5.0}, {}, "deliver_at: deliver_after is given, too; give only one of them"),
        ({"deliver_at": NOW - MS}, {"on_past": OnPast.FAIL}, "deliver_at: 2030-01-01T11:59:59.999000+00:00 has passed"),
        ({"deliver_at": None, "deliver_after": -1.0}, {"on_past": OnPast.FAIL}, "deliver_after: 2030-01-01T11:59:59"),
        ({"deliver_at": None, "deliver_after": 1e300}, {}, "deliver_after: 1e+300 is not a delay"),
        ({"deliver_at": None, "deliver_after": float("nan")}, {}, "deliver_after: nan is not a delay"),
        ({"deliver_at": None, "deliver_after": 1e12}, {}, "deliver_after: the time is out of range; use a year"),
        ({"headers": [("a", None)]}, {}, "headers: 'a': None is not text"),
        ({"headers": [("a", "b\0")]}, {}, "headers: 'a': 'b\\x00' is not text"),
        ({"key": "k\0"}, {}, "key: 'k\\x00' is not text"),
        ({"content_type": "x" * 256}, {}, "content_type: "),
        ({"priority": 256}, {}, "priority: 256 is out of range; use 0 to 255"),
        ({"priority": -1}, {}, "priority: -1 is out of range"),
    ],
)
def test_a_bad_row_is_refused_by_its_column_and_the_others_are_read(
    bad: dict[str, Any], options: dict[str, Any], sentence: str
):
    good = {"id": "good", "channel": "orders", "deliver_at": SOON, "deliver_after": None}
    rows = read(good, good | {"id": "bad"} | bad, good | {"id": "better"}, **options)
    assert [message.id for message in rows.messages] == ["good", "better"]
    assert rows.numbers == [0, 2]
    assert list(rows.errors) == [1]
    assert str(rows.errors[1]).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("2030-01-01T13:00:00", "deliver_at: 2030-01-01T13:00:00 has no time zone"),
        ("tomorrow", "deliver_at: 'tomorrow' is not a time"),
    ],
)
def test_a_time_as_text_needs_a_zone(text: str, sentence: str):
    rows = read({"deliver_at": text}, types={"deliver_at": pa.string()})
    assert rows.messages == []
    assert str(rows.errors[0]).startswith(sentence)


def test_a_time_beyond_the_calendar_is_refused():
    column = pa.array([2**60], pa.int64()).cast(pa.timestamp("us", "UTC"))
    rows = read({"deliver_at": column[0]}, types={"deliver_at": pa.timestamp("us", "UTC")})
    assert str(rows.errors[0]) == "deliver_at: the time is out of range; use a year from 1 to 9999"


@pytest.mark.parametrize("name", ["id", "channel", "key", "payload", "content_type"])
def test_text_that_is_not_utf_8_is_refused_by_its_column(name: str):
    good = {"id": "1", "channel": "orders", "key": "k", "payload": "p", "content_type": "text/plain"}
    # Spark's strings may contain any bytes.
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([good[name].encode(), b"\xff\xfe"], pa.binary()).buffers())
    from airflow_delay_provider.spark.datasource.columns import MessageColumns
    from airflow_delay_provider.spark.datasource.options import WriteOptions
    from tests.unit.spark.datasource.batch import batch_of

    batch = batch_of(good | {"deliver_at": SOON}, good | {"id": "2", "deliver_at": SOON})
    batch = batch.set_column(batch.schema.get_field_index(name), name, broken)
    rows = MessageColumns(WriteOptions()).read(batch, now=NOW)
    assert [message.id for message in rows.messages] == ["1"]
    assert str(rows.errors[1]).startswith(f"{name}: is not UTF-8")
