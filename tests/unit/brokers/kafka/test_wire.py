from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.domain.clock import ceil_ms, from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message, Origin

NOW_MS = 1_900_000_000_000
DUE = datetime(2031, 5, 4, 17, 0, tzinfo=UTC)
DUE_MS = ceil_ms(DUE)
#: Every header that means something to us.
OURS = [
    protocol.ID,
    protocol.DELIVER_AT,
    protocol.DELIVER_AFTER_MS,
    protocol.CHANNEL,
    protocol.KEY,
    protocol.SCHEDULED_AT,
    protocol.HANDLED_COUNT,
    protocol.PRIORITY,
    protocol.ORIGIN,
    protocol.CONTENT_TYPE,
    protocol.CHANGE,
    protocol.REASON,
]

texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=60)
header_names = texts.filter(lambda name: name and name != protocol.CONTENT_TYPE and not name.startswith("delay-"))
printable = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60).filter(str.isprintable)
messages = st.builds(
    Message,
    id=printable,
    channel=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,60}", fullmatch=True),
    payload=st.binary(max_size=100),
    deliver_at=st.integers(-(10**11), 2 * 10**14).map(from_ms),
    key=st.none() | texts,
    headers=st.dictionaries(header_names, texts, max_size=4),
    content_type=texts.filter(bool),
    priority=st.integers(0, 255),
    handled_count=st.integers(0, 10**6),
    origin=st.none() | st.builds(Origin, dag_id=texts, run_id=texts, task_id=texts, map_index=st.integers(-1, 10**6)),
)
#: Values that other producers may write: arbitrary ones, and ones that resemble ours.
values = (
    st.binary(max_size=30)
    | texts.map(str.encode)
    | st.integers(-(10**20), 10**20).map(lambda number: b"%d" % number)
    | st.sampled_from([b"999999999999999", b"-x", b".", b"orders", b"Infinity", b'["a", "b", "c", Infinity]', b"NaN"])
    | st.sampled_from([b"[" * 5_000, b'["a", "b", "c", 1]', "²".encode(), b"--5", b"2031-05-04T17:00:00Z", b" 7 "])
)
any_headers = st.lists(st.tuples(st.sampled_from(OURS) | texts, values), max_size=6)


def make(**options: Any) -> Message:
    given: dict[str, Any] = {"id": "m1", "channel": "orders", "payload": b"x", "deliver_at": DUE}
    return Message(**given | options)


def envelope_of(message: Message, **options: Any) -> wire.Envelope:
    value = wire.encode_envelope(message, now_ms=NOW_MS, **options)
    return wire.Envelope(wire.encode_key(ceil_ms(message.deliver_at), message.id), value)


def read(headers: protocol.Headers | None, **options: Any) -> protocol.DecodedMessage:
    given: dict[str, Any] = {"topic": "orders", "default_id": "orders-0-7", "key": None, "value": b"x"}
    return protocol.decode_message(headers=headers, **{"timestamp_ms": NOW_MS} | given | options)


def request(headers: Mapping[str, bytes | str], **options: Any) -> Message:
    listed = [(name, value.encode() if isinstance(value, str) else value) for name, value in headers.items()]
    given: dict[str, Any] = {"default_id": "inbox-0-7", "key": b"k", "value": b"x", "timestamp_ms": NOW_MS}
    return protocol.decode_request(headers=listed, **given | options)


# -- in the ladder -------------------------------------------------------------------------------------------------


@given(messages, st.sampled_from([None, Change.REQUEUED, Change.DEAD_LETTERED]), st.none() | texts)
def test_an_envelope_carries_everything_there_and_back(
    message: Message, change: Change | None, reason: str | None
) -> None:
    """B7, B8, E11: with the topic it goes to and its deadline, nothing has to be looked up."""
    decoded = envelope_of(message, change=change, reason=reason).decode()
    assert decoded == protocol.DecodedMessage(
        message=message, scheduled_at=from_ms(NOW_MS), change=change, reason=reason
    )


@given(st.tuples(st.integers(0, 2**63), printable), st.tuples(st.integers(0, 2**63), printable))
def test_keys_are_in_the_order_of_time_and_then_of_ids(one: tuple[int, str], other: tuple[int, str]) -> None:
    """D5"""
    keys = [wire.encode_key(*each) for each in (one, other)]
    assert (keys[0] < keys[1]) == ((one[0], one[1].encode()) < (other[0], other[1].encode()))
    assert [wire.held_until_ms(key) for key in keys] == [one[0], other[0]]


def test_due_times_before_1970_become_1970() -> None:
    assert wire.held_until_ms(wire.encode_key(-5, "m1")) == 0


@given(messages, st.integers(0, 4 * 10**12))
def test_a_moved_envelope_has_another_due_time_and_nothing_else(message: Message, due_ms: int) -> None:
    """A27"""
    value = wire.encode_envelope(message, now_ms=NOW_MS, change=Change.REQUEUED, reason="again")
    decoded = wire.Envelope(wire.encode_key(due_ms, message.id), wire.with_deliver_at(value, due_ms)).decode()
    assert decoded.message.deliver_at == from_ms(due_ms)
    assert decoded.change is None
    assert decoded.scheduled_at == from_ms(NOW_MS)
    assert wire.with_deliver_at(wire.with_deliver_at(value, due_ms), 0) == wire.with_deliver_at(value, 0)


def test_an_envelope_of_another_version_is_refused_with_the_remedy() -> None:
    value = b"\x02" + wire.encode_envelope(make(), now_ms=NOW_MS)[1:]
    with pytest.raises(InvalidMessageError, match="envelope: version 2 is unknown; upgrade the dispatcher"):
        wire.Envelope(wire.encode_key(0, "m1"), value)


def test_a_due_time_is_never_rounded_down() -> None:
    """C9"""
    message = make(deliver_at=DUE.replace(microsecond=1))
    assert envelope_of(message).deliver_at_ms == DUE_MS + 1


# -- in a channel --------------------------------------------------------------------------------------------------


@given(messages)
def test_a_message_is_read_from_its_channel_as_it_was_given(message: Message) -> None:
    """B7, B8, B31"""
    key = None if message.key is None else message.key.encode()
    headers = envelope_of(message).record_headers()
    decoded = read(headers, topic=message.channel, key=key, value=message.payload)
    assert decoded == protocol.DecodedMessage(message=message, scheduled_at=from_ms(NOW_MS), change=None, reason=None)


@given(messages, texts)
def test_a_dead_letter_says_where_it_belongs_and_why_it_is_dead(message: Message, reason: str) -> None:
    """A15, A25"""
    headers = wire.encode_headers(message, now_ms=NOW_MS, topic="graveyard", change=Change.DEAD_LETTERED, reason=reason)
    decoded = read(headers, topic="graveyard")
    assert (decoded.message.channel, decoded.change, decoded.reason) == (
        message.channel,
        Change.DEAD_LETTERED,
        reason or None,
    )


def test_a_plain_record_in_a_channel_is_a_message_too() -> None:
    """B8"""
    decoded = read(None, key=b"\xffk", value=None)
    message = decoded.message
    assert (message.id, message.channel, message.payload, message.key) == ("orders-0-7", "orders", b"", "\\xffk")
    assert message.deliver_at == decoded.scheduled_at == from_ms(NOW_MS)


@given(any_headers, st.none() | st.binary(max_size=20), st.none() | st.binary(max_size=20), st.integers(-1, 10**13))
def test_nothing_that_others_write_into_a_channel_stops_its_consumers(
    headers: protocol.Headers, key: bytes | None, value: bytes | None, timestamp_ms: int
) -> None:
    """B37: and a message that was read can be requeued."""
    decoded = read(headers, key=key, value=value, timestamp_ms=timestamp_ms)
    assert decoded.message.payload == (value or b"")
    wire.encode_envelope(decoded.message.requeued(DUE), now_ms=NOW_MS)


# -- in the inbox, by any producer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "value", "due_ms"),
    [
        (protocol.DELIVER_AT, str(DUE_MS), DUE_MS),
        (protocol.DELIVER_AT, f" {DUE_MS} ", DUE_MS),
        (protocol.DELIVER_AT, "2031-05-04T17:00:00Z", DUE_MS),
        (protocol.DELIVER_AT, "2031-05-04T19:00:00+02:00", DUE_MS),
        (protocol.DELIVER_AT, "-5", -5),
        (protocol.DELIVER_AFTER_MS, "0", NOW_MS),
        (protocol.DELIVER_AFTER_MS, "5000", NOW_MS + 5_000),
        (protocol.DELIVER_AFTER_MS, "-5000", NOW_MS - 5_000),
    ],
)
def test_any_producer_schedules_by_headers_at_a_time_or_after_a_delay(header: str, value: str, due_ms: int) -> None:
    """D1, D15, D20, E2: two names with one meaning each, and the delay counts from when Kafka has the record."""
    message = request({protocol.CHANNEL: "orders", header: value})
    assert message.deliver_at == from_ms(due_ms)
    assert (message.id, message.channel, message.payload, message.key) == ("inbox-0-7", "orders", b"x", "k")


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({protocol.DELIVER_AT: "5"}, "delay-channel: is missing; name the topic to deliver to"),
        ({protocol.CHANNEL: "", protocol.DELIVER_AT: "5"}, "delay-channel: is missing"),
        ({protocol.CHANNEL: "a b", protocol.DELIVER_AT: "5"}, "channel: 'a b' cannot be a Kafka topic"),
        ({protocol.CHANNEL: "..", protocol.DELIVER_AT: "5"}, "channel: '..' cannot be a Kafka topic"),
        (
            {protocol.CHANNEL: "-x", protocol.DELIVER_AT: "5"},
            "channel: '-x' cannot be a Kafka topic; .* starting with a letter",
        ),
        ({protocol.CHANNEL: "orders"}, "delay-deliver-at: is missing; give either"),
        (
            {protocol.CHANNEL: "orders", protocol.DELIVER_AT: "5", protocol.DELIVER_AFTER_MS: "5"},
            "delay-deliver-after-ms is given",
        ),
        (
            {protocol.CHANNEL: "orders", protocol.DELIVER_AT: "tomorrow"},
            "deliver_at: 'tomorrow' is not a time",
        ),
        ({protocol.CHANNEL: "orders", protocol.DELIVER_AT: "2031-05-04T17:00:00"}, "has no time zone"),
        ({protocol.CHANNEL: "orders", protocol.DELIVER_AT: "9" * 20}, "is not a time; use milliseconds"),
        (
            {protocol.CHANNEL: "orders", protocol.DELIVER_AFTER_MS: "9" * 20},
            "is not a time; use milliseconds",
        ),
        (
            {protocol.CHANNEL: "orders", protocol.DELIVER_AFTER_MS: "5 s"},
            "'5 s' is not a time; use milliseconds",
        ),
        (
            {protocol.CHANNEL: "orders", protocol.DELIVER_AT: "5", protocol.ID: "a\nb"},
            "message_id: 'a\\\\nb' is not a valid id",
        ),
        (
            {protocol.CHANNEL: "orders", protocol.DELIVER_AT: "5", protocol.PRIORITY: "256"},
            "priority: 256 is out of range",
        ),
    ],
)
def test_a_request_that_cannot_be_kept_is_refused_with_a_sentence(headers: dict[str, str], problem: str) -> None:
    """B3"""
    with pytest.raises(InvalidMessageError, match=problem):
        request(headers)


def test_a_request_may_say_everything_that_a_message_has() -> None:
    """B7, B31, E11"""
    origin = Origin(dag_id="d", run_id="r", task_id="t", map_index=2)
    message = request(
        {
            protocol.CHANNEL: "orders",
            protocol.DELIVER_AT: str(DUE_MS),
            protocol.ID: "m1",
            protocol.KEY: "customer",
            protocol.CONTENT_TYPE: "text/plain",
            protocol.PRIORITY: "7",
            protocol.HANDLED_COUNT: "3",
            protocol.ORIGIN: json.dumps(["d", "r", "t", 2]),
            "trace": "a1",
        }
    )
    assert message == make(
        key="customer",
        headers={"trace": "a1"},
        content_type="text/plain",
        priority=7,
        handled_count=3,
        origin=origin,
    )


@given(any_headers, st.none() | st.binary(max_size=20), st.none() | st.binary(max_size=20))
def test_a_request_is_either_kept_or_refused_and_never_anything_else(
    headers: protocol.Headers, key: bytes | None, value: bytes | None
) -> None:
    """B37: and the kept part fits into an envelope."""
    headers = [(protocol.CHANNEL, b"orders"), (protocol.DELIVER_AFTER_MS, b"5"), *headers]
    try:
        message = protocol.decode_request(default_id="p", key=key, value=value, headers=headers, timestamp_ms=NOW_MS)
    except InvalidMessageError:
        return
    assert envelope_of(message).decode().message == message


# -- what a record cannot carry ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"channel": "events:order.created"}, "channel: .* cannot be a Kafka topic"),
        ({"channel": "o" * 250}, "channel: .* cannot be a Kafka topic; use 1-249 letters"),
        ({"priority": 256}, "priority: 256 is out of range; use 0 to 255"),
        ({"priority": -1}, "priority: -1 is out of range"),
        ({"headers": {"delay-anything": "x"}}, "headers: 'delay-anything' is reserved; use another name"),
        ({"headers": {"content-type": "x"}}, "headers: 'content-type' is reserved"),
        ({"headers": {"big": "x" * 100_000}}, "bytes of headers and key are too many; put the data into the payload"),
        ({"key": "ä" * 50_001}, "bytes of headers and key are too many"),
    ],
)
def test_messages_that_a_record_cannot_carry_are_refused(options: dict[str, Any], problem: str) -> None:
    """A12"""
    with pytest.raises(InvalidMessageError, match=problem):
        protocol.check_message(make(**options))


@given(messages)
def test_messages_that_are_not_refused_fit_into_an_envelope(message: Message) -> None:
    protocol.check_message(message)
    assert envelope_of(message).decode().message == message


def test_any_reason_can_be_stored() -> None:
    assert protocol.clean_reason("a\0b\ud800" + "c" * 3_000) == "ab?" + "c" * 1_996
