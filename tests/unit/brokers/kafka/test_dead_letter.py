from __future__ import annotations

import pytest

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.brokers.kafka.wire import CUT_BYTES, MOST_BYTES, dead_letter_of
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.message import Message, Origin

PLACE = RecordPosition(topic="delay.v1.inbox", partition=3, offset=17)


def test_a_dead_letter_holds_all_that_a_replay_needs() -> None:
    message = Message(
        id="m1",
        channel="orders",
        payload=b"\x00\xff",
        deliver_at=from_ms(1_900_000_000_000),
        key="customer",
        headers={"trace": "a1"},
        content_type="text/plain",
        priority=3,
        handled_count=2,
        origin=Origin(dag_id="d", run_id="r", task_id="t"),
    )
    record = Record(17, 0, wire.encode_key(1, "m1"), wire.encode_envelope(message, now_ms=5))
    key, value, headers = dead_letter_of(PLACE, record, "no such topic")
    decoded = protocol.decode_message(
        topic="delay.v1.dead", default_id="p", key=key, value=value, headers=headers, timestamp_ms=0
    )
    assert decoded.message == message
    assert decoded.reason == "no such topic"
    assert dict(headers)[protocol.SOURCE] == b"delay.v1.inbox/3/17"


@pytest.mark.parametrize(
    "record",
    [
        Record(17, 0, None, None),
        Record(17, 0, b"k", b"", [("a", None)]),  # type: ignore[list-item]  # the library gives such
        Record(17, 0, b"k", b"value", [("a", b"b"), ("a", b"c")]),
    ],
)
def test_a_record_that_is_no_message_is_kept_unchanged(record: Record) -> None:
    key, value, headers = dead_letter_of(PLACE, record, "why")
    assert (key, value) == (record.key, record.value)
    assert headers[: len(record.headers or [])] == (record.headers or [])


def test_of_what_is_not_worth_its_bytes_the_beginning_is_kept() -> None:
    _, value, headers = dead_letter_of(PLACE, Record(17, 0, b"k", b"x" * 70_000), "why", most_bytes=1_000)
    assert value == b"x" * 1_000
    assert int(dict(headers)[protocol.TRUNCATED] or b"") > 70_000


@pytest.mark.parametrize(
    "record",
    [
        Record(17, 0, b"k", bytes(2 * MOST_BYTES), [("a", b"b")]),
        Record(17, 0, bytes(2 * MOST_BYTES), b"v"),
        Record(17, 0, b"k", b"v", [("large", bytes(2 * MOST_BYTES)), ("a", b"b")]),
        Record(17, 0, b"k", b"v", [("\u00fc" * MOST_BYTES, b"")]),
        Record(17, 0, b"k", b"v", [("a", b"")] * (MOST_BYTES // 10)),
    ],
    ids=["value", "key", "header", "name of a header", "many headers"],
)
def test_of_what_is_too_large_the_beginning_is_kept(record: Record) -> None:
    key, value, headers = dead_letter_of(PLACE, record, "too large")
    size = len(key or b"") + len(value or b"") + sum(len(name.encode()) + len(text or b"") for name, text in headers)
    assert size < 3 * CUT_BYTES
    recorded = dict(headers)
    assert (recorded[protocol.REASON], recorded[protocol.SOURCE]) == (b"too large", b"delay.v1.inbox/3/17")
    assert int(recorded[protocol.TRUNCATED]) > MOST_BYTES


def test_forged_headers_cannot_change_the_source_of_a_dead_letter() -> None:
    record = Record(17, 0, b"k", b"v", [(protocol.SOURCE, b"elsewhere"), (protocol.REASON, b"a lie")])
    _, _, headers = dead_letter_of(PLACE, record, "why")
    assert [text for name, text in headers if name in (protocol.SOURCE, protocol.REASON)] == [
        b"why",
        b"delay.v1.inbox/3/17",
    ]
