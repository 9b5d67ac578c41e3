"""The desk at which tickets are shown: one look and one write for all that come together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from airflow_delay_provider.brokers.embedded import EmbeddedBroker
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.hooks import cluster_gate as gate
from airflow_delay_provider.ledger.tables import cluster_gate, scheduled_message
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, WaitsFor
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from airflow_delay_provider.triggers.retry_desk import Extension, Place, RetryDesk
from tests.unit.airflow.listening import MasterPort
from tests.unit.airflow.tickets import issue, tickets_in
from tests.waiting import until

MS = timedelta(milliseconds=1)
PLACE = Place(spark_conn_id="spark_default", channel=DEFAULT_CHANNEL)


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
    await until(lambda: not any(t.name.startswith(RetryDesk.__name__) for t in threading.enumerate()))
    assert not BrokerThread._running


async def finish(waiting: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waiting, timeout=30)


def is_up(_conn_id: str) -> bool:
    return True


def is_down(_conn_id: str) -> bool:
    return False


def says_nothing(_conn_id: str) -> None:
    return None


def place(check: str | None, **options: Any) -> Place:
    path = None if check is None else f"{__name__}.{check}"
    return Place(**{"spark_conn_id": "spark_default", "channel": DEFAULT_CHANNEL, "check": path} | options)


async def test_a_ticket_of_a_cluster_that_is_up_may_go(broker: EmbeddedBroker, master: MasterPort) -> None:
    master.open()
    with RetryDesk.shared("delay_default") as desk:
        assert await finish(desk.show(issue(broker), PLACE)) is None
    assert [each.extension for each in tickets_in(broker)] == [0]


async def test_a_ticket_of_a_cluster_that_is_down_is_extended_and_confirmed(
    broker: EmbeddedBroker, master: MasterPort
) -> None:
    ticket = issue(broker)
    with RetryDesk.shared("delay_default") as desk:
        extension: Extension = await finish(desk.show(ticket, PLACE))
    assert (extension.ticket.extension, extension.ticket.waits_for) == (1, WaitsFor.CLUSTER)
    assert [each.id for each in tickets_in(broker, State.SCHEDULED)] == [ticket.id, extension.ticket.id]
    assert extension.ticket.id in [entry.message_id for entry in broker.read_journal(after=extension.since)]


async def test_a_ticket_of_a_cluster_that_is_down_does_not_go_when_the_next_look_is_due_by_then(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LOOKS", Backoff(initial=0 * MS, cap=0 * MS, floor=0 * MS))
    with RetryDesk.shared("delay_default") as desk:
        extension: Extension | None = await finish(desk.show(issue(broker), PLACE))
    assert extension is not None
    assert extension.ticket.waits_for is WaitsFor.CLUSTER


async def test_a_ticket_that_had_its_turn_goes_before_those_that_wait_for_one(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.01")
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSION_BURST", "1")
    master.open()
    first, second = issue(broker, map_index=0), issue(broker, map_index=1)
    turns = [issue(broker, map_index=n).extended(broker.clock.now(), WaitsFor.TURN) for n in (2, 3)]
    with RetryDesk.shared("delay_default") as desk:
        answers = await finish(asyncio.gather(*(desk.show(each, PLACE) for each in (first, second, *turns))))
    assert answers[0] is None
    assert answers[1].ticket.waits_for is WaitsFor.TURN
    assert answers[2:] == [None, None]


async def test_the_users_own_check_decides(broker: EmbeddedBroker, master: MasterPort) -> None:
    with RetryDesk.shared("delay_default") as desk:
        assert await finish(desk.show(issue(broker), place("is_up"))) is None
        extension: Extension = await finish(desk.show(issue(broker), place("is_down", spark_conn_id="spark_other")))
    assert extension.ticket.waits_for is WaitsFor.CLUSTER
    assert master.looks == 0


@pytest.mark.parametrize("wrong", ["says_nothing", "is_nowhere"])
async def test_a_check_that_is_wrong_fails_its_own_tickets_only(
    broker: EmbeddedBroker, master: MasterPort, wrong: str
) -> None:
    master.open()
    with RetryDesk.shared("delay_default") as desk:
        refused, served = await finish(
            asyncio.gather(
                desk.show(issue(broker, map_index=0), place(wrong)),
                desk.show(issue(broker, map_index=1), PLACE),
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
    with RetryDesk.shared("delay_default") as desk:
        up, down = await finish(
            asyncio.gather(
                desk.show(issue(broker, map_index=0), PLACE),
                desk.show(issue(broker, map_index=1), place(None, spark_conn_id="spark_other")),
            )
        )
    assert up is None
    assert down.ticket.waits_for is WaitsFor.CLUSTER


@contextmanager
def missing(broker: EmbeddedBroker, table: str) -> Iterator[None]:
    """The ledger fails while one of its tables is not there."""

    def rename(old: str, new: str) -> None:
        broker.ledger.transact(lambda connection: connection.exec_driver_sql(f"ALTER TABLE {old} RENAME TO {new}"))

    rename(table, "gone")
    yield
    rename("gone", table)


@pytest.mark.parametrize("table", [cluster_gate.name, scheduled_message.name])
@pytest.mark.parametrize("up", [True, False])
async def test_tickets_wait_on_while_the_ledger_is_away(
    broker: EmbeddedBroker, master: MasterPort, table: str, up: bool
) -> None:
    if up:
        master.open()
    tickets = [issue(broker, map_index=number) for number in range(3)]
    with RetryDesk.shared("delay_default") as desk:
        await until(lambda: desk._has_looked)
        with missing(broker, table):
            waiting = [asyncio.create_task(desk.show(ticket, PLACE)) for ticket in tickets]
            if table == cluster_gate.name or not up:
                await until(lambda: desk._failures >= 3)
        answers = await finish(asyncio.gather(*waiting))
    extended = [each for each in tickets_in(broker) if each.extension]
    assert len(extended) == (0 if up else 3)
    assert [answer is None for answer in answers] == [up] * 3


async def test_all_that_are_served_together_cause_one_look(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.01")
    master.open()
    tickets = [issue(broker, map_index=number) for number in range(50)]
    with RetryDesk.shared("delay_default") as desk:
        await until(lambda: desk._has_looked)
        with missing(broker, cluster_gate.name):
            waiting = [asyncio.create_task(desk.show(ticket, PLACE)) for ticket in tickets]
            await until(lambda: desk._failures >= 1 and len(desk._shown) == 50)
        answers = await finish(asyncio.gather(*waiting))
    assert master.looks == 1
    assert sum(answer is None for answer in answers) == 5
    assert len([each for each in tickets_in(broker) if each.waits_for is WaitsFor.TURN]) == 45


async def test_a_task_that_left_before_it_was_answered_leaves_no_ticket(
    broker: EmbeddedBroker, master: MasterPort
) -> None:
    with RetryDesk.shared("delay_default") as desk:
        await until(lambda: desk._has_looked)
        with missing(broker, cluster_gate.name):
            leaver = asyncio.create_task(desk.show(issue(broker, map_index=0), PLACE))
            stayer = asyncio.create_task(desk.show(issue(broker, map_index=1), PLACE))
            await until(lambda: desk._failures >= 1)
            leaver.cancel()
            await asyncio.wait([leaver])
        assert (await finish(stayer)).ticket.extension == 1
    assert [each.origin.map_index for each in tickets_in(broker) if each.extension] == [1]


async def test_the_same_extension_shown_again_is_the_same_ticket(broker: EmbeddedBroker, master: MasterPort) -> None:
    """As after a restart of the triggerer."""
    ticket = issue(broker)
    with RetryDesk.shared("delay_default") as desk:
        first: Extension = await finish(desk.show(ticket, PLACE))
        again: Extension = await finish(desk.show(ticket, PLACE))
    assert first.ticket.id == again.ticket.id
    assert len(tickets_in(broker)) == 2
