from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, Ticket, WaitsFor

BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ORIGIN = Origin(dag_id="sales", run_id="manual__1", task_id="load", map_index=-1)
TICKET = Ticket(
    origin=ORIGIN,
    began_at=BEGAN,
    attempt=2,
    verdict="transient",
    reason="a source refused",
    cluster="spark://10.0.0.1:7077",
    deliver_at=BEGAN + MINUTE,
)


def test_the_same_wait_has_the_same_id_for_any_due_time_and_reason():
    again = replace(TICKET, deliver_at=BEGAN + 9 * MINUTE, reason="said otherwise", waits_for=WaitsFor.CLUSTER)
    assert again.id == TICKET.id


@pytest.mark.parametrize(
    "other",
    [
        replace(TICKET, attempt=3),
        replace(TICKET, extension=1),
        replace(TICKET, began_at=BEGAN + timedelta(milliseconds=1)),
        replace(TICKET, origin=replace(ORIGIN, map_index=0)),
        replace(TICKET, origin=replace(ORIGIN, run_id="manual__2")),
    ],
)
def test_another_wait_has_another_id(other: Ticket):
    assert other.id != TICKET.id


def test_a_ticket_is_extended_without_another_attempt():
    extended = TICKET.extended(BEGAN + 2 * MINUTE, WaitsFor.CLUSTER)
    assert extended == replace(TICKET, deliver_at=BEGAN + 2 * MINUTE, waits_for=WaitsFor.CLUSTER, extension=1)
    assert extended.extended(BEGAN, WaitsFor.RATE_LIMIT).extension == 2
    assert len({TICKET.id, extended.id, extended.extended(BEGAN, WaitsFor.RATE_LIMIT).id}) == 3


def test_a_ticket_goes_as_a_message_of_its_task():
    message = TICKET.as_message(DEFAULT_CHANNEL)
    assert (message.id, message.channel, message.deliver_at) == (TICKET.id, DEFAULT_CHANNEL, TICKET.deliver_at)
    assert (message.content_type, message.origin) == ("application/json", ORIGIN)
    assert json.loads(message.payload)["reason"] == "a source refused"


def test_a_ticket_read_back_is_due_when_its_message_is():
    moved = replace(TICKET.as_message(DEFAULT_CHANNEL), deliver_at=BEGAN)
    assert Ticket.from_message(moved) == replace(TICKET, deliver_at=BEGAN)


@pytest.mark.parametrize("payload", [b"", b"\xff", b"[]", b"3", b"null", b"{}", b'{"origin": 1}', b'{"origin": {}}'])
def test_a_message_of_another_program_is_no_ticket(payload: bytes):
    assert Ticket.from_message(Message(channel=DEFAULT_CHANNEL, payload=payload, deliver_at=BEGAN)) is None


MOMENTS = st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 - hypothesis adds the zone
TICKETS = st.builds(
    Ticket,
    origin=st.builds(
        Origin,
        dag_id=st.text(min_size=1, max_size=9),
        run_id=st.text(min_size=1, max_size=9),
        task_id=st.text(min_size=1, max_size=9),
        map_index=st.integers(-1, 9),
    ),
    began_at=MOMENTS,
    attempt=st.integers(1, 150),
    verdict=st.sampled_from(["transient", "infrastructure", ""]),
    reason=st.text(max_size=20),
    cluster=st.text(max_size=20),
    deliver_at=MOMENTS,
    waits_for=st.sampled_from(WaitsFor),
    extension=st.integers(0, 10_000),
)


@given(ticket=TICKETS)
def test_a_ticket_survives_being_stored(ticket: Ticket):
    stored = Ticket.from_json(json.loads(json.dumps(ticket.as_json())))
    assert stored == ticket
    assert stored.id == ticket.id


def test_only_plain_json_is_stored():
    stored: dict[str, Any] = TICKET.as_json()
    origin = stored.pop("origin")
    assert all(type(each) in (str, int) for each in [*stored.values(), *origin.values()])
