"""Admission of due tickets: one check and one write for all that are due together."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.tables import cluster_circuit, scheduled_message
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.spark import admission as admission_module
from airflow_delay_provider.spark.admission import Extension, RetryAdmission, RetryTarget
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, WaitsFor
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from tests.unit.airflow.listening import MasterPort
from tests.unit.airflow.tickets import issue, tickets_in
from tests.waiting import until

MS = timedelta(milliseconds=1)
TARGET = RetryTarget(spark_conn_id="spark_default", channel=DEFAULT_CHANNEL)


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[MasterPort]:
    port = MasterPort()
    port.define_connection(monkeypatch)
    yield port
    port.close()


@pytest.fixture(autouse=True)
async def _no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(BrokerThread, "outage", Backoff(initial=20 * MS, cap=50 * MS, floor=10 * MS))
    yield
    await until(lambda: not any(t.name.startswith(RetryAdmission.__name__) for t in threading.enumerate()))
    assert not BrokerThread._running


async def finish(waiting: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waiting, timeout=30)


def is_up(_conn_id: str) -> bool:
    return True


def is_down(_conn_id: str) -> bool:
    return False


def says_nothing(_conn_id: str) -> None:
    return None


def target(check: str | None, **options: Any) -> RetryTarget:
    path = None if check is None else f"{__name__}.{check}"
    return RetryTarget(**{"spark_conn_id": "spark_default", "channel": DEFAULT_CHANNEL, "check": path} | options)


async def test_a_ticket_of_a_cluster_that_is_up_is_admitted(broker: EmbeddedBroker, master: MasterPort) -> None:
    master.open()
    with RetryAdmission.shared("delay_default") as admission:
        assert await finish(admission.admit(issue(broker), TARGET)) is None
    assert [each.extension for each in tickets_in(broker)] == [0]


async def test_a_ticket_of_a_cluster_that_is_down_is_extended_and_confirmed(
    broker: EmbeddedBroker, master: MasterPort
) -> None:
    ticket = issue(broker)
    with RetryAdmission.shared("delay_default") as admission:
        extension: Extension = await finish(admission.admit(ticket, TARGET))
    assert (extension.ticket.extension, extension.ticket.waits_for) == (1, WaitsFor.CLUSTER)
    assert [each.id for each in tickets_in(broker, State.SCHEDULED)] == [ticket.id, extension.ticket.id]
    assert extension.ticket.id in [entry.message_id for entry in broker.read_journal(after=extension.since)]


async def test_a_ticket_of_a_cluster_that_is_down_is_not_admitted_when_the_next_check_is_due_by_then(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "CHECKS", Backoff(initial=0 * MS, cap=0 * MS, floor=0 * MS))
    with RetryAdmission.shared("delay_default") as admission:
        extension: Extension | None = await finish(admission.admit(issue(broker), TARGET))
    assert extension is not None
    assert extension.ticket.waits_for is WaitsFor.CLUSTER


async def test_a_ticket_with_a_token_is_admitted_before_those_that_wait_for_one(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.01")
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSION_BURST", "1")
    master.open()
    first, second = issue(broker, map_index=0), issue(broker, map_index=1)
    turns = [issue(broker, map_index=n).extended(broker.clock.now(), WaitsFor.RATE_LIMIT) for n in (2, 3)]
    with RetryAdmission.shared("delay_default") as admission:
        answers = await finish(asyncio.gather(*(admission.admit(each, TARGET) for each in (first, second, *turns))))
    assert answers[0] is None
    assert answers[1].ticket.waits_for is WaitsFor.RATE_LIMIT
    assert answers[2:] == [None, None]


async def test_the_users_own_check_decides(broker: EmbeddedBroker, master: MasterPort) -> None:
    with RetryAdmission.shared("delay_default") as admission:
        assert await finish(admission.admit(issue(broker), target("is_up"))) is None
        extension: Extension = await finish(
            admission.admit(issue(broker), target("is_down", spark_conn_id="spark_other"))
        )
    assert extension.ticket.waits_for is WaitsFor.CLUSTER
    assert master.looks == 0


@pytest.mark.parametrize("wrong", ["says_nothing", "is_nowhere"])
async def test_a_check_that_is_wrong_fails_its_own_tickets_only(
    broker: EmbeddedBroker, master: MasterPort, wrong: str
) -> None:
    master.open()
    with RetryAdmission.shared("delay_default") as admission:
        refused, served = await finish(
            asyncio.gather(
                admission.admit(issue(broker, map_index=0), target(wrong)),
                admission.admit(issue(broker, map_index=1), TARGET),
                return_exceptions=True,
            )
        )
    assert isinstance(refused, ConfigurationError)
    assert served is None


async def test_clusters_do_not_answer_for_each_other(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.open()
    MasterPort().define_connection(monkeypatch, "spark_other")
    with RetryAdmission.shared("delay_default") as admission:
        up, down = await finish(
            asyncio.gather(
                admission.admit(issue(broker, map_index=0), TARGET),
                admission.admit(issue(broker, map_index=1), target(None, spark_conn_id="spark_other")),
            )
        )
    assert up is None
    assert down.ticket.waits_for is WaitsFor.CLUSTER


async def test_an_extension_is_never_shorter_than_the_connection_accepts(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused, it would be asked for again and again."""
    ticket = issue(broker)
    extra = {"ledger_url": str(broker.ledger.url), "min_delay": 1800}
    monkeypatch.setenv("AIRFLOW_CONN_DELAY_LONG", json.dumps({"conn_type": "delay", "extra": extra}))
    with RetryAdmission.shared("delay_long") as admission:
        extension: Extension = await finish(admission.admit(ticket, TARGET))
    assert extension.ticket.waits_for is WaitsFor.CLUSTER
    (stored,) = [each for each in tickets_in(broker) if each.extension]
    assert stored.deliver_at >= broker.clock.now() + timedelta(minutes=29)
    assert stored.deliver_at - extension.ticket.deliver_at < timedelta(milliseconds=1)


async def test_an_extension_that_is_refused_fails_its_own_tickets_only(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    master.open()
    MasterPort().define_connection(monkeypatch, "spark_other")
    refuses = target(None, spark_conn_id="spark_other", channel="no channel")
    with RetryAdmission.shared("delay_default") as admission:
        refused, served = await finish(
            asyncio.gather(
                admission.admit(issue(broker, map_index=0), refuses),
                admission.admit(issue(broker, map_index=1), TARGET),
                return_exceptions=True,
            )
        )
    assert isinstance(refused, InvalidMessageError)
    assert served is None


@contextmanager
def missing(broker: EmbeddedBroker, table: str) -> Iterator[None]:
    """The ledger fails while one of its tables is not there."""

    def rename(old: str, new: str) -> None:
        broker.ledger.transact(lambda connection: connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}"))

    rename(table, "gone")
    yield
    rename("gone", table)


@pytest.mark.parametrize("table", [cluster_circuit.name, scheduled_message.name])
@pytest.mark.parametrize("up", [True, False])
async def test_tickets_wait_on_while_the_ledger_is_unavailable(
    broker: EmbeddedBroker, master: MasterPort, table: str, up: bool
) -> None:
    if up:
        master.open()
    tickets = [issue(broker, map_index=number) for number in range(3)]
    with RetryAdmission.shared("delay_default") as admission:
        await until(lambda: admission._has_polled)
        with missing(broker, table):
            waiting = [asyncio.create_task(admission.admit(ticket, TARGET)) for ticket in tickets]
            if table == cluster_circuit.name or not up:
                await until(lambda: admission._failures >= 3)
        answers = await finish(asyncio.gather(*waiting))
    extended = [each for each in tickets_in(broker) if each.extension]
    assert len(extended) == (0 if up else 3)
    assert [answer is None for answer in answers] == [up] * 3


async def test_tickets_that_are_due_together_cause_one_check(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.01")
    master.open()
    tickets = [issue(broker, map_index=number) for number in range(50)]
    with RetryAdmission.shared("delay_default") as admission:
        await until(lambda: admission._has_polled)
        with missing(broker, cluster_circuit.name):
            waiting = [asyncio.create_task(admission.admit(ticket, TARGET)) for ticket in tickets]
            await until(lambda: admission._failures >= 1 and len(admission._requests) == 50)
        answers = await finish(asyncio.gather(*waiting))
    assert master.looks == 1
    assert sum(answer is None for answer in answers) == 5
    assert len([each for each in tickets_in(broker) if each.waits_for is WaitsFor.RATE_LIMIT]) == 45


async def test_a_trigger_that_is_cancelled_before_the_decision_leaves_no_ticket(
    broker: EmbeddedBroker, master: MasterPort
) -> None:
    with RetryAdmission.shared("delay_default") as admission:
        await until(lambda: admission._has_polled)
        with missing(broker, cluster_circuit.name):
            leaver = asyncio.create_task(admission.admit(issue(broker, map_index=0), TARGET))
            stayer = asyncio.create_task(admission.admit(issue(broker, map_index=1), TARGET))
            await until(lambda: admission._failures >= 1)
            leaver.cancel()
            await asyncio.wait([leaver])
        assert (await finish(stayer)).ticket.extension == 1
    assert [each.origin.map_index for each in tickets_in(broker) if each.extension] == [1]


async def test_the_same_extension_of_a_ticket_is_the_same_ticket(broker: EmbeddedBroker, master: MasterPort) -> None:
    """As after a restart of the triggerer."""
    ticket = issue(broker)
    with RetryAdmission.shared("delay_default") as admission:
        first: Extension = await finish(admission.admit(ticket, TARGET))
        again: Extension = await finish(admission.admit(ticket, TARGET))
    assert first.ticket.id == again.ticket.id
    assert len(tickets_in(broker)) == 2
