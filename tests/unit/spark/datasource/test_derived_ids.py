from __future__ import annotations

import random
from datetime import timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.spark.datasource.derived_ids import derive_ids
from tests.unit.spark.datasource.batch import NOW, SOON, read

ROW: dict[str, Any] = {
    "channel": "orders",
    "payload": "hello",
    "deliver_at": SOON,
    "key": "k",
    "headers": [("a", "1"), ("b", "2")],
    "content_type": "text/plain",
    "priority": 1,
}


def id_of(row: dict[str, Any], **options: Any) -> str:
    [message] = read(row, **options).messages
    return message.id


def test_a_derived_id_is_a_uuid_of_version_5_that_never_changes():
    identity = id_of(ROW)
    assert (UUID(identity).version, UUID(identity).variant) == (5, "specified in RFC 4122")
    assert identity == "0bfce636-eee3-530a-83dc-c33b91e57570"


@pytest.mark.parametrize(
    "other",
    [
        {"channel": "invoices"},
        {"payload": "hello!"},
        {"deliver_at": SOON + timedelta(microseconds=1)},
        {"key": "l"},
        {"key": None},
        {"headers": [("a", "1"), ("b", "3")]},
        {"headers": [("a", "1b1:2")]},
        {"headers": None},
        {"content_type": "text/html"},
        {"priority": 2},
    ],
)
def test_a_row_with_another_value_has_another_id(other: dict[str, Any]):
    assert id_of(ROW | other) != id_of(ROW)


def test_another_prefix_gives_other_ids():
    assert id_of(ROW, id_prefix="2030-01-01") != id_of(ROW, id_prefix="2030-01-02") != id_of(ROW)


def test_order_of_columns_of_headers_and_of_rows_do_not_matter():
    names = list(ROW)
    random.Random(7).shuffle(names)
    other = {name: ROW[name] for name in names} | {"headers": ROW["headers"][::-1]}
    rows = read(ROW | {"payload": "first"}, other)
    assert rows.messages[1].id == id_of(ROW)


def test_a_row_without_a_channel_has_the_id_of_one_with_the_default_channel():
    assert id_of(ROW | {"channel": None}, channel="orders") == id_of(ROW)


def test_a_column_of_nulls_changes_nothing():
    alone = {"payload": "hello", "deliver_at": SOON}
    assert id_of(alone) == id_of(alone | {"key": None, "headers": None, "content_type": None, "priority": None})


def test_the_id_of_a_delayed_row_contains_the_delay_and_not_the_moment():
    delayed = {"payload": "hello", "deliver_after": 3600.0}
    assert id_of(delayed) == id_of(delayed)
    assert id_of(delayed) != id_of({"payload": "hello", "deliver_at": NOW + timedelta(hours=1)})
    as_interval = {"payload": "hello", "deliver_after": timedelta(hours=1)}
    assert id_of(delayed) == id_of(as_interval, types={"deliver_after": pa.duration("us")})


@given(
    st.lists(
        st.tuples(st.text(), st.one_of(st.none(), st.binary()), st.one_of(st.none(), st.text())),
        unique=True,
        max_size=20,
    )
)
def test_no_two_rows_share_an_id(rows: list[tuple[str, bytes | None, str | None]]):
    columns = {name: list(values) for name, values in zip("abc", zip(*rows, strict=True), strict=False)}
    assert len(set(derive_ids("", columns, rows=len(rows)))) == len(rows)
