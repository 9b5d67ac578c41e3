"""What a Spark task does with its broker between two submissions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from airflow_delay_provider.brokers.embedded import EmbeddedBroker
from airflow_delay_provider.domain.journal import FROM_THE_START
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.exceptions import ConfigurationError, LedgerError
from airflow_delay_provider.hooks.cluster_gate import Bucket, ClusterGate
from airflow_delay_provider.hooks.ticket_office import SWEEP, TicketOffice, TicketPlaces
from airflow_delay_provider.spark.history import History
from airflow_delay_provider.spark.probes.address import parse_address
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, DEFAULT_DEAD_LETTER_CHANNEL, Ticket
from tests.unit.airflow.listening import MasterPort
from tests.unit.airflow.test_message_triggers import unreachable
from tests.unit.airflow.tickets import HOUR, issue, tickets_in

CLUSTER = parse_address("local[1]")


@pytest.fixture
def office(broker: EmbeddedBroker) -> Iterator[TicketOffice]:
    broker.check()
    with TicketOffice(TicketPlaces()) as opened:
        yield opened


@pytest.fixture
def ticket(broker: EmbeddedBroker) -> Ticket:
    """One that is scheduled already."""
    return issue(broker)


def file_of(broker: EmbeddedBroker) -> Path:
    return Path(str(broker.ledger.url.database))


def test_a_ticket_scheduled_again_changes_nothing(office: TicketOffice, broker: EmbeddedBroker, ticket: Ticket) -> None:
    assert office.schedule(replace(ticket, deliver_at=ticket.deliver_at + HOUR)) == FROM_THE_START
    (kept,) = tickets_in(broker)
    assert kept.deliver_at - ticket.deliver_at < timedelta(milliseconds=1)


def test_a_ticket_that_cannot_be_stored_is_not_said_to_be(
    office: TicketOffice, broker: EmbeddedBroker, ticket: Ticket
) -> None:
    with unreachable(file_of(broker)), pytest.raises(LedgerError):
        office.schedule(replace(ticket, attempt=3))
    assert [each.attempt for each in tickets_in(broker)] == [2]


def test_a_ticket_is_taken_back_once_and_for_all(office: TicketOffice, broker: EmbeddedBroker, ticket: Ticket) -> None:
    office.cancel(ticket.id)
    office.cancel(ticket.id)
    office.cancel("never-scheduled")
    assert tickets_in(broker, State.CANCELLED) != []
    assert tickets_in(broker, State.SCHEDULED) == []


def test_a_ticket_that_has_come_is_not_taken_back(
    office: TicketOffice, broker: EmbeddedBroker, ticket: Ticket, dispatch: Callable[..., int]
) -> None:
    dispatch(HOUR)
    office.cancel(ticket.id)
    assert len(tickets_in(broker, State.DISPATCHED)) == 1


def test_a_dead_letter_of_the_same_life_is_sent_once(
    office: TicketOffice, broker: EmbeddedBroker, ticket: Ticket
) -> None:
    now = broker.clock.now()
    for began_at in (now, now, now + HOUR):
        office.send_dead_letter(ticket.origin, History(began_at=began_at), "all used up")
    letters = broker.peek(DEFAULT_DEAD_LETTER_CHANNEL, limit=10)
    assert len(letters) == 2
    assert json.loads(letters[0].payload)["reason"] == "all used up"


def test_a_dead_letter_that_cannot_be_sent_is_only_told(
    broker: EmbeddedBroker, office: TicketOffice, ticket: Ticket, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(began_at=broker.clock.now())
    with unreachable(file_of(broker)):
        office.send_dead_letter(ticket.origin, history, "all used up")
    assert caplog.text.count("No dead letter was sent to delay.retries.dead") == 1


def test_a_dead_letter_over_a_connection_that_is_gone_is_only_told(
    broker: EmbeddedBroker, ticket: Ticket, caplog: pytest.LogCaptureFixture
) -> None:
    """The task must fail with its own reason, or its job would be submitted once more."""
    with TicketOffice(TicketPlaces(delay_conn_id="delay_gone")) as office:
        office.send_dead_letter(ticket.origin, History(began_at=broker.clock.now()), "all used up")
    assert "'delay_gone' is not defined" in caplog.text


def test_tickets_that_have_come_are_swept_some_at_a_time(
    office: TicketOffice, broker: EmbeddedBroker, dispatch: Callable[..., int]
) -> None:
    for number in range(SWEEP + 5):
        issue(broker, map_index=number)
    dispatch(HOUR)
    office.sweep()
    assert len(broker.peek(DEFAULT_CHANNEL, limit=1000)) == 5
    office.sweep()
    office.sweep()
    assert broker.peek(DEFAULT_CHANNEL) == []


def test_a_sweep_that_fails_is_only_told(
    office: TicketOffice, broker: EmbeddedBroker, ticket: Ticket, caplog: pytest.LogCaptureFixture
) -> None:
    with unreachable(file_of(broker)):
        office.sweep()
    assert "Old tickets stay in delay.retries" in caplog.text


def test_an_outage_that_others_have_seen_is_found(office: TicketOffice, broker: EmbeddedBroker) -> None:
    cluster = parse_address(MasterPort().name)
    assert office.find_outage(cluster) is None
    ClusterGate(broker.ledger, cluster, bucket=Bucket(), clock=broker.clock).ask(1)
    assert office.find_outage(cluster) is not None


def test_not_knowing_of_an_outage_holds_nobody_back(
    office: TicketOffice, broker: EmbeddedBroker, ticket: Ticket, caplog: pytest.LogCaptureFixture
) -> None:
    with unreachable(file_of(broker)):
        assert office.find_outage(CLUSTER) is None
        office.await_turn(CLUSTER, sleep=pytest.fail)
    assert "Cannot ask whether local is known to be down" in caplog.text
    assert "Cannot ask for a turn at local" in caplog.text


def test_submissions_that_crowd_keep_their_distance(
    office: TicketOffice, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.01")
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSION_BURST", "2")
    pauses: list[float] = []
    for _ in range(4):
        office.await_turn(CLUSTER, sleep=pauses.append)
    assert pauses[:2] == [0.0, 0.0]
    assert pauses[2:] == [pytest.approx(100, abs=50), pytest.approx(200, abs=50)]


def test_a_connection_that_is_not_defined_is_told_before_anything_is_submitted(broker: EmbeddedBroker) -> None:
    with TicketOffice(TicketPlaces(delay_conn_id="delay_gone")) as office, pytest.raises(ConfigurationError):
        office.find_outage(CLUSTER)
