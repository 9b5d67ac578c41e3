"""Tickets of Spark retries on their broker, and the pacing of submissions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.sdk.observability import stats

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.exceptions import ConfigurationError, LedgerError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, State
from airflow_delay_provider.spark.admission import ClusterCircuit, TokenBucket, find_outage, wait_for_token
from airflow_delay_provider.spark.cluster.address import parse_address
from airflow_delay_provider.spark.retries import History
from airflow_delay_provider.spark.tickets import (
    DEFAULT_CHANNEL,
    DEFAULT_DEAD_LETTER_CHANNEL,
    SWEEP,
    RetryTickets,
    Ticket,
)
from tests.unit.airflow.listening import MasterPort
from tests.unit.airflow.test_message_triggers import unreachable
from tests.unit.airflow.tickets import HOUR, issue, tickets_in

CLUSTER = parse_address("local[1]")


@pytest.fixture
def tickets(broker: EmbeddedBroker) -> Iterator[RetryTickets]:
    broker.check()
    with RetryTickets() as opened:
        yield opened


@pytest.fixture
def ticket(broker: EmbeddedBroker) -> Ticket:
    """One that is scheduled already."""
    return issue(broker)


def file_of(broker: EmbeddedBroker) -> Path:
    return Path(str(broker.ledger.url.database))


def test_a_ticket_scheduled_again_changes_nothing(
    tickets: RetryTickets, broker: EmbeddedBroker, ticket: Ticket
) -> None:
    assert tickets.schedule(replace(ticket, deliver_at=ticket.deliver_at + HOUR)) == FROM_THE_START
    (kept,) = tickets_in(broker)
    assert kept.deliver_at - ticket.deliver_at < timedelta(milliseconds=1)


def test_a_ticket_counts_as_scheduled_once(
    tickets: RetryTickets, ticket: Ticket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B38"""
    counted: list[tuple[str, float, str]] = []
    monkeypatch.setattr(stats, "incr", lambda name, count, *, tags: counted.append((name, count, tags["channel"])))
    for _ in range(2):
        tickets.schedule(replace(ticket, attempt=3))
    assert counted == [("delay.scheduled", 1, DEFAULT_CHANNEL)]


def test_a_ticket_that_cannot_be_stored_raises_an_error(
    tickets: RetryTickets, broker: EmbeddedBroker, ticket: Ticket
) -> None:
    with unreachable(file_of(broker)), pytest.raises(LedgerError):
        tickets.schedule(replace(ticket, attempt=3))
    assert [each.attempt for each in tickets_in(broker)] == [2]


def test_a_ticket_is_cancelled_once_and_for_all(tickets: RetryTickets, broker: EmbeddedBroker, ticket: Ticket) -> None:
    tickets.cancel(ticket.id)
    tickets.cancel(ticket.id)
    tickets.cancel("never-scheduled")
    assert tickets_in(broker, State.CANCELLED) != []
    assert tickets_in(broker, State.SCHEDULED) == []


def test_a_ticket_that_was_dispatched_is_not_cancelled(
    tickets: RetryTickets, broker: EmbeddedBroker, ticket: Ticket, dispatch: Callable[..., int]
) -> None:
    dispatch(HOUR)
    tickets.cancel(ticket.id)
    assert len(tickets_in(broker, State.DISPATCHED)) == 1


def test_a_dead_letter_of_the_same_history_is_sent_once(
    tickets: RetryTickets, broker: EmbeddedBroker, ticket: Ticket
) -> None:
    now = broker.clock.now()
    for began_at in (now, now, now + HOUR):
        tickets.send_dead_letter(ticket.origin, History(began_at=began_at), "all used up")
    letters = broker.peek(DEFAULT_DEAD_LETTER_CHANNEL, limit=10)
    assert len(letters) == 2
    assert json.loads(letters[0].payload)["reason"] == "all used up"


def test_a_dead_letter_that_cannot_be_sent_is_only_logged(
    broker: EmbeddedBroker, tickets: RetryTickets, ticket: Ticket, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(began_at=broker.clock.now())
    with unreachable(file_of(broker)):
        tickets.send_dead_letter(ticket.origin, history, "all used up")
    assert caplog.text.count("No dead letter was sent to delay.retries.dead") == 1


def test_a_dead_letter_over_an_undefined_connection_is_only_logged(
    broker: EmbeddedBroker, ticket: Ticket, caplog: pytest.LogCaptureFixture
) -> None:
    """The task must fail with its own reason, or its job would be submitted once more."""
    with RetryTickets(delay_conn_id="delay_gone") as tickets:
        tickets.send_dead_letter(ticket.origin, History(began_at=broker.clock.now()), "all used up")
    assert "'delay_gone' is not defined" in caplog.text


def test_dispatched_tickets_are_swept_some_at_a_time(
    tickets: RetryTickets, broker: EmbeddedBroker, dispatch: Callable[..., int]
) -> None:
    for number in range(SWEEP + 5):
        issue(broker, map_index=number)
    dispatch(HOUR)
    tickets.sweep()
    assert len(broker.peek(DEFAULT_CHANNEL, limit=1000)) == 5
    tickets.sweep()
    tickets.sweep()
    assert broker.peek(DEFAULT_CHANNEL) == []


def test_a_sweep_that_fails_is_only_logged(
    tickets: RetryTickets, broker: EmbeddedBroker, ticket: Ticket, caplog: pytest.LogCaptureFixture
) -> None:
    with unreachable(file_of(broker)):
        tickets.sweep()
    assert "Old tickets stay in delay.retries" in caplog.text


def test_an_outage_that_others_have_seen_is_found(tickets: RetryTickets, broker: EmbeddedBroker) -> None:
    cluster = parse_address(MasterPort().name)
    assert find_outage(tickets.hook, cluster) is None
    ClusterCircuit(broker.ledger, cluster, bucket=TokenBucket(), clock=broker.clock).decide(1)
    assert find_outage(tickets.hook, cluster) is not None


def test_a_ledger_that_cannot_be_read_stops_no_submission(
    tickets: RetryTickets, broker: EmbeddedBroker, ticket: Ticket, caplog: pytest.LogCaptureFixture
) -> None:
    with unreachable(file_of(broker)):
        assert find_outage(tickets.hook, CLUSTER) is None
        wait_for_token(tickets.hook, CLUSTER, sleep=pytest.fail)
    assert "Cannot read whether local is known to be down" in caplog.text
    assert "Cannot pace the submission to local" in caplog.text


def test_submissions_at_the_same_time_are_paced(
    tickets: RetryTickets, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.01")
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSION_BURST", "2")
    pauses: list[float] = []
    for _ in range(4):
        wait_for_token(tickets.hook, CLUSTER, sleep=pauses.append)
    assert pauses[:2] == [0.0, 0.0]
    assert pauses[2:] == [pytest.approx(100, abs=50), pytest.approx(200, abs=50)]


def test_an_undefined_connection_is_refused_before_anything_is_submitted(broker: EmbeddedBroker) -> None:
    with RetryTickets(delay_conn_id="delay_gone") as tickets, pytest.raises(ConfigurationError):
        find_outage(tickets.hook, CLUSTER)
