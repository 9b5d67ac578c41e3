from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq import wire
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message, Origin

NOW = datetime(2030, 1, 1, 12, 0, 0, 250_500, tzinfo=UTC)
RESERVED = [
    "delay-deliver-at",
    "delay-anything",
    "x-death",
    "x-first-death-queue",
    "x-last-death-reason",
    "x-delivery-count",
    "x-acquired-count",
    "x-opt-deaths",
    "x-opt-delivery-time",
    "x-stream-offset",
    "x-shovelled-by",
    "CC",
    "BCC",
]

texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=60)
header_names = texts.filter(lambda name: not name.startswith(("delay-", "x-", "CC", "BCC")))
printable = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60).filter(str.isprintable)
origins = st.builds(Origin, dag_id=texts, run_id=texts, task_id=texts, map_index=st.integers(-1, 10**6))
messages = st.builds(
    Message,
    id=printable,
    channel=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,60}", fullmatch=True),
    payload=st.binary(max_size=100),
    deliver_at=st.integers(-(10**11), 4 * 10**12).map(from_ms),
    key=st.none() | texts,
    headers=st.dictionaries(header_names, texts, max_size=4),
    content_type=texts.filter(bool),
    priority=st.integers(0, 255),
    handled_count=st.integers(0, 10**6),
    origin=st.none() | origins,
)


def over_the_wire(properties: BasicProperties) -> BasicProperties:
    """As the other side reads them, from bytes."""
    read = BasicProperties()
    read.decode(b"".join(properties.encode()))
    return read


def make(**options: Any) -> Message:
    return Message(**{"id": "m1", "channel": "orders", "payload": b"x", "deliver_at": NOW} | options)


def read(body: bytes = b"x", **properties: Any) -> wire.DecodedMessage:
    return wire.decode_message(over_the_wire(BasicProperties(**properties)), body, queue="inbox", now=NOW)


@given(messages)
def test_a_message_that_was_written_is_read_back_the_same(message: Message) -> None:
    """B7, B8: nothing of it is lost or changed on the way."""
    wire.check_message(message)
    properties = over_the_wire(wire.encode_properties(message, now=NOW))
    decoded = wire.decode_message(properties, message.payload, queue="another", now=NOW)
    assert decoded.message == message
    assert (decoded.scheduled_at, decoded.change, decoded.reason) == (from_ms(floor_ms(NOW)), None, None)


def test_consumers_without_this_package_see_plain_headers() -> None:
    """B7, B8"""
    message = make(
        key="customer-7",
        headers={"trace": "abc"},
        content_type="application/json",
        priority=3,
        handled_count=2,
        origin=Origin(dag_id="d", run_id="r", task_id="t", map_index=4),
    )
    properties = over_the_wire(wire.encode_properties(message, now=NOW))
    assert (properties.message_id, properties.content_type, properties.priority) == ("m1", "application/json", 3)
    assert properties.delivery_mode == 2
    assert properties.headers == {
        "trace": "abc",
        "delay-deliver-at": ceil_ms(NOW),
        "delay-scheduled-at": floor_ms(NOW),
        "delay-handled-count": 2,
        "delay-channel": "orders",
        "delay-key": "customer-7",
        "delay-origin": '["d", "r", "t", 4]',
    }


@pytest.mark.parametrize("change", [Change.REQUEUED, Change.DEAD_LETTERED])
def test_a_repost_says_what_it_is_and_why(change: Change) -> None:
    """A25"""
    properties = over_the_wire(wire.encode_properties(make(), now=NOW, change=change, reason="bad \ud800 day"))
    decoded = wire.decode_message(properties, b"x", queue="orders", now=NOW)
    assert (decoded.change, decoded.reason) == (change, "bad ? day")
    long = wire.encode_properties(make(), now=NOW, change=change, reason="y" * 10_000)
    assert len(long.headers["delay-reason"]) == wire.MAX_REASON_LENGTH


# -- messages of others --------------------------------------------------------------------------------------------


def test_a_message_of_others_is_read_as_far_as_it_says_anything() -> None:
    decoded = read(b"\xff\x00")
    message = decoded.message
    assert (message.channel, message.payload, message.deliver_at) == ("inbox", b"\xff\x00", from_ms(floor_ms(NOW)))
    assert (message.key, message.headers, message.priority, message.handled_count) == (None, {}, 0, 0)
    assert (message.content_type, message.origin, decoded.scheduled_at) == ("application/octet-stream", None, None)
    assert message.id != read().message.id


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            {"n": 7, "yes": True, "nothing": None, "list": [1]},
            {"n": "7", "yes": "True", "nothing": "None", "list": "[1]"},
        ),
        ({"nul\0": "a\0b"}, {"nul": "ab"}),
        (dict.fromkeys(RESERVED, "x"), {}),
        ({"CC-list": "x", "BCCs": "y", "delayed": "z"}, {"CC-list": "x", "BCCs": "y", "delayed": "z"}),
    ],
)
def test_headers_of_others_become_text_and_the_brokers_own_are_left_out(
    headers: dict[str, Any], expected: dict[str, str]
) -> None:
    """An ``x-death`` that goes into the ladder again would make the broker drop the message silently."""
    assert read(headers=headers).message.headers == expected


@pytest.mark.parametrize(
    "headers",
    [
        {"delay-deliver-at": "soon"},
        {"delay-deliver-at": 10**18},
        {"delay-deliver-at": None},
        {"delay-handled-count": -1},
        {"delay-handled-count": "many"},
        {"delay-origin": "{"},
        {"delay-origin": "[1]"},
        {"delay-origin": 5},
        {"delay-channel": 7},
        {"delay-channel": "no channel!"},
        {"delay-key": 9},
        {"delay-change": "exploded"},
        {"delay-change": [1]},
        {"delay-reason": 4},
        {"delay-scheduled-at": {"a": 1}},
    ],
)
def test_nonsense_in_our_headers_is_no_reason_to_lose_a_message(headers: dict[str, Any]) -> None:
    decoded = read(headers=headers)
    assert (decoded.message.channel, decoded.message.handled_count) == ("inbox", 0)
    assert (decoded.message.origin, decoded.message.key, decoded.change, decoded.reason) == (None, None, None, None)


@pytest.mark.parametrize("message_id", [None, "", "two\nlines"])
def test_an_id_that_is_none_is_replaced(message_id: str | None) -> None:
    assert len(read(message_id=message_id).message.id) == 36


@pytest.mark.parametrize(
    ("given", "read_as"), [("", "application/octet-stream"), ("\0", "application/octet-stream"), ("a\0b", "ab")]
)
def test_a_content_type_of_others_becomes_one_that_every_broker_carries(given: str, read_as: str) -> None:
    assert read(content_type=given).message.content_type == read_as


def test_headers_that_a_broker_adds_are_not_taken_for_headers_of_the_user() -> None:
    """Users of ours write text only, also by names that begin with ``x-``; a broker of a later version counts more."""
    message = make(headers={"x-request-id": "abc"})
    properties = wire.encode_properties(message, now=NOW)
    properties.headers |= {"x-acquired-count": 3, "x-handed-out-count": 4, "x-opt-seen": "yes", "x-seen-by": ["n1"]}
    assert wire.decode_message(over_the_wire(properties), b"x", queue="orders", now=NOW).message == message


# -- what AMQP cannot carry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_headers_are_refused(name: str) -> None:
    with pytest.raises(InvalidMessageError, match=f"headers: '{name}' is reserved; use another name"):
        wire.check_message(make(headers={name: "x"}))


def test_headers_that_only_begin_like_reserved_ones_are_not_refused() -> None:
    wire.check_message(make(headers={"CC-list": "x", "BCCs": "y", "delayed": "z"}))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "ü" * 128}, "message_id: 'ü+' is more than 255 bytes long; use a shorter id"),
        ({"content_type": "ü" * 128}, "content_type: is more than 255 bytes long; use a shorter one"),
        ({"headers": {"ü" * 128: "x"}}, r"headers: 'ü+'\.\.\. is more than 255 bytes long; use a shorter name"),
        ({"headers": {"big": "x" * 100_001}}, "bytes of headers and key are too many for AMQP; put the data into"),
        ({"key": "x" * 100_001}, "bytes of headers and key are too many for AMQP; put the data into"),
        ({"headers": {"ü" * 100 + str(n): "" for n in range(500)}}, "bytes of headers and key are too many"),
        ({"priority": 256}, "priority: 256 is not an AMQP priority; use 0 to 255"),
        ({"priority": -1}, "priority: -1 is not an AMQP priority; use 0 to 255"),
    ],
)
def test_messages_that_amqp_cannot_carry_are_refused_before_they_are_sent(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidMessageError, match=problem):
        wire.check_message(make(**options))


def test_the_most_that_is_accepted_fits_into_one_frame() -> None:
    """AMQP cannot split properties: larger ones would end the connection."""
    headers = {f"h{n}": "v" * 990 for n in range(98)}
    message = make(
        id="i" * 255,
        content_type="c" * 255,
        headers=headers,
        origin=Origin(dag_id="d" * 250, run_id="r" * 250, task_id="t" * 250),
    )
    wire.check_message(message)
    properties = wire.encode_properties(message, now=NOW, change=Change.REQUEUED, reason="ü" * 3000)
    assert len(b"".join(properties.encode())) < 128 * 1024
