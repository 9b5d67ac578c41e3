"""The trigger of Spark tasks that wait: a real event loop, ledger and dispatcher, and a port that is open or closed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.serde import deserialize, serialize

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.spark import admission
from airflow_delay_provider.spark.admission import RetryAdmission
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL, WaitsFor
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from airflow_delay_provider.triggers.journal_tail import JournalTail
from airflow_delay_provider.triggers.spark import RetryTicketTrigger
from tests.unit.airflow.listening import MasterPort
from tests.unit.airflow.tickets import HOUR, issue, restarted, tickets_in, trigger_of
from tests.unit.elsewhere import define_elsewhere
from tests.waiting import until

MS = timedelta(milliseconds=1)
Dispatch = Callable[..., int]


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[MasterPort]:
    """The cluster of the default connection."""
    port = MasterPort()
    port.define_connection(monkeypatch)
    yield port
    port.close()


@pytest.fixture(autouse=True)
def _checks_follow_each_other_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "CHECKS", Backoff(initial=100 * MS, cap=100 * MS, floor=100 * MS))


@pytest.fixture
def checks_follow_each_other_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a ticket is extended once, however slow the machine is."""
    monkeypatch.setattr(admission, "CHECKS", Backoff(initial=HOUR, cap=HOUR, floor=HOUR))


@pytest.fixture(autouse=True)
async def _no_thread_is_left() -> AsyncIterator[None]:
    yield
    await until(lambda: not shared_threads())
    assert not BrokerThread._running


@pytest.fixture
def dispatching(broker: EmbeddedBroker) -> Iterator[None]:
    """A real dispatcher in a thread."""
    config = DispatcherConfig(health_port=None)
    dispatcher = Dispatcher(
        Ledger(broker.ledger.url), open_broker=lambda conn_id: DelayHook(conn_id).get_conn(), config=config
    )
    dispatcher.start()
    yield
    dispatcher.stop()


def shared_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith((JournalTail.__name__, RetryAdmission.__name__))]


def start(trigger: RetryTicketTrigger) -> asyncio.Task[Any]:
    async def first_event() -> Any:
        return (await anext(trigger.run())).payload

    return asyncio.create_task(first_event())


async def finish(waiting: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waiting, timeout=30)


async def stop(waiting: asyncio.Task[Any]) -> None:
    """As the triggerer does when it ends, or when it hands its triggers to another."""
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_ticket_that_comes_while_the_cluster_is_up_means_go(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort
) -> None:
    master.open()
    waiting = start(trigger_of(issue(broker)))
    await until(lambda: len(shared_threads()) == 2)
    assert master.looks == 0
    dispatch(HOUR)

    assert await finish(waiting) == {"outcome": "go", "extensions": 0}
    assert master.looks == 1


async def test_while_the_cluster_is_down_the_ticket_is_extended_and_costs_no_attempt(
    broker: EmbeddedBroker, dispatching: None, master: MasterPort
) -> None:
    ticket = issue(broker, after=timedelta(0))
    waiting = start(trigger_of(ticket))
    await until(lambda: len(tickets_in(broker)) >= 4)

    extended = tickets_in(broker)
    assert [each.extension for each in extended] == list(range(len(extended)))
    assert {each.waits_for for each in extended[1:]} == {WaitsFor.CLUSTER}
    assert {(each.attempt, each.origin, each.reason) for each in extended} == {(2, ticket.origin, ticket.reason)}
    assert all(later.deliver_at - earlier.deliver_at >= 100 * MS for earlier, later in pairwise(extended[1:]))

    master.open()
    event = await finish(waiting)
    assert event == {"outcome": "go", "extensions": len(tickets_in(broker)) - 1}
    assert tickets_in(broker, State.SCHEDULED) == []


@pytest.mark.usefixtures("checks_follow_each_other_rarely")
async def test_expediting_an_extended_ticket_does_not_pass_a_cluster_that_is_down(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort
) -> None:
    waiting = start(trigger_of(issue(broker), give_up_after=24 * HOUR))
    dispatch(HOUR)
    await until(lambda: tickets_in(broker, State.SCHEDULED))
    (first,) = tickets_in(broker, State.SCHEDULED)
    broker.expedite([first.id])
    dispatch()
    await until(lambda: [each.extension for each in tickets_in(broker, State.SCHEDULED)] == [2])
    (second,) = tickets_in(broker, State.SCHEDULED)
    assert second.deliver_at == first.deliver_at
    await stop(waiting)


async def test_cancelling_the_ticket_gives_the_task_up(broker: EmbeddedBroker, master: MasterPort) -> None:
    ticket = issue(broker)
    waiting = start(trigger_of(ticket))
    broker.cancel([ticket.id])
    assert await finish(waiting) == {"outcome": "given_up", "extensions": 0}
    assert master.looks == 0


@pytest.mark.usefixtures("checks_follow_each_other_rarely")
async def test_cancelling_an_extended_ticket_gives_the_task_up(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort
) -> None:
    waiting = start(trigger_of(issue(broker), give_up_after=24 * HOUR))
    dispatch(HOUR)
    await until(lambda: tickets_in(broker, State.SCHEDULED))
    broker.cancel([each.id for each in tickets_in(broker, State.SCHEDULED)])
    assert await finish(waiting) == {"outcome": "given_up", "extensions": 1}


@pytest.mark.usefixtures("checks_follow_each_other_rarely")
async def test_a_ticket_that_would_be_due_too_late_expires_and_is_cancelled(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort
) -> None:
    waiting = start(trigger_of(issue(broker), give_up_after=HOUR))
    dispatch(HOUR)
    assert await finish(waiting) == {"outcome": "expired", "extensions": 1}
    assert [each.extension for each in tickets_in(broker, State.CANCELLED)] == [1]
    assert tickets_in(broker, State.SCHEDULED) == []


async def test_a_ticket_that_its_broker_refuses_is_lost(
    broker: EmbeddedBroker, master: MasterPort, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    far = define_elsewhere(monkeypatch, tmp_path, ledger_url=str(broker.ledger.url))
    ticket = issue(broker)
    with DelayHook(far, hold="ledger").get_conn() as held:
        held.schedule([ticket.extended(ticket.deliver_at, WaitsFor.CLUSTER).as_message(DEFAULT_CHANNEL)])
    waiting = start(trigger_of(ticket.extended(ticket.deliver_at, WaitsFor.CLUSTER), delay_conn_id=far, hold="ledger"))
    now_ms = ceil_ms(ticket.deliver_at)

    def refuse(connection: Any) -> None:
        claims = delivery.claim_due(
            connection, destination=far, owner="test", now_ms=now_ms, until_ms=now_ms + 1000, limit=10
        )
        delivery.mark_dead(connection, claims, now_ms=now_ms, reason="too large")

    broker.ledger.transact(refuse)
    assert (await finish(waiting))["outcome"] == "lost"


async def test_ending_the_task_takes_its_ticket_back(broker: EmbeddedBroker, master: MasterPort) -> None:
    trigger = trigger_of(issue(broker))
    waiting = start(trigger)
    await stop(waiting)
    await trigger.on_kill()
    assert tickets_in(broker, State.SCHEDULED) == []
    assert len(tickets_in(broker, State.CANCELLED)) == 1


@pytest.mark.usefixtures("checks_follow_each_other_rarely")
async def test_stopping_the_task_cancels_its_extended_ticket(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort
) -> None:
    trigger = trigger_of(issue(broker), give_up_after=24 * HOUR)
    waiting = start(trigger)
    dispatch(HOUR)
    await until(lambda: trigger._current.extension == 1)
    await stop(waiting)
    await trigger.on_kill()
    assert tickets_in(broker, State.SCHEDULED) == []
    assert [each.extension for each in tickets_in(broker, State.CANCELLED)] == [1]


async def test_stopping_a_task_whose_ticket_was_dispatched_raises_nothing(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort
) -> None:
    trigger = trigger_of(issue(broker))
    dispatch(HOUR)
    await trigger.on_kill()
    assert len(tickets_in(broker, State.DISPATCHED)) == 1


@pytest.mark.parametrize("dispatched_meanwhile", [False, True])
async def test_a_trigger_that_is_restarted_in_mid_extension_goes_on_and_schedules_nothing_twice(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort, dispatched_meanwhile: bool
) -> None:
    trigger = trigger_of(issue(broker))
    waiting = start(trigger)
    dispatch(HOUR)
    await until(lambda: trigger._current.extension >= 1)
    await stop(waiting)
    await until(lambda: not shared_threads())
    before = tickets_in(broker)
    if dispatched_meanwhile:
        dispatch(HOUR)
    else:
        await until(lambda: broker.clock.now() > before[-1].deliver_at)

    master.open()
    again = restarted(trigger)
    waiting = start(again)
    # The outage that was seen may hold for another moment, and then there is another ticket.
    await until(lambda: dispatch(HOUR) >= 0 and waiting.done())
    event = await finish(waiting)

    # Each extension has one ticket, even after several requests.
    after = tickets_in(broker)
    assert event["outcome"] == "go"
    assert [each.extension for each in after] == list(range(len(after)))
    assert after[: len(before)] == before
    assert event["extensions"] <= len(after) - 1


@pytest.mark.usefixtures("checks_follow_each_other_rarely")
async def test_a_ticket_given_up_while_no_triggerer_ran_is_given_up(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort
) -> None:
    trigger = trigger_of(issue(broker), give_up_after=24 * HOUR)
    waiting = start(trigger)
    dispatch(HOUR)
    await until(lambda: trigger._current.extension == 1)
    await stop(waiting)
    broker.cancel([trigger._current.id])

    assert (await finish(start(restarted(trigger))))["outcome"] == "given_up"


async def test_many_tickets_that_are_due_together_cause_few_checks_and_are_spread(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.02")
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSION_BURST", "5")
    master.open()
    waiting = [start(trigger_of(issue(broker, map_index=number))) for number in range(50)]
    await until(
        lambda: any(isinstance(each, RetryAdmission) and each.users == 50 for each in BrokerThread._running.values())
    )
    assert len(shared_threads()) == 2
    dispatch(HOUR)
    await until(lambda: len(tickets_in(broker, State.SCHEDULED)) == 45)
    await until(lambda: sum(task.done() for task in waiting) == 5)

    # One check serves all tickets that have come by then, on a busy machine only a few.
    assert 1 <= master.looks <= 25
    turns = tickets_in(broker, State.SCHEDULED)
    assert {each.waits_for for each in turns} == {WaitsFor.RATE_LIMIT}
    assert {later.deliver_at - earlier.deliver_at for earlier, later in pairwise(turns)} == {timedelta(seconds=50)}

    looks = master.looks
    dispatch(HOUR)
    events = await finish(asyncio.gather(*waiting))
    assert [event["outcome"] for event in events] == ["go"] * 50
    assert sorted(event["extensions"] for event in events) == [0] * 5 + [1] * 45
    assert master.looks <= looks + 25


@pytest.mark.usefixtures("checks_follow_each_other_rarely")
async def test_many_tickets_of_a_cluster_that_is_down_share_its_checks(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort
) -> None:
    """Once one has seen the outage, all wait for the same next look."""
    waiting = [start(trigger_of(issue(broker, map_index=number), give_up_after=24 * HOUR)) for number in range(20)]
    dispatch(HOUR)
    await until(lambda: len(tickets_in(broker, State.SCHEDULED)) == 20)
    due = [each.deliver_at for each in tickets_in(broker, State.SCHEDULED)]
    assert max(due) - min(due) <= MS
    for each in waiting:
        await stop(each)


async def test_a_cluster_that_goes_down_while_a_ticket_waits_for_its_turn_is_waited_for(
    broker: EmbeddedBroker, dispatch: Dispatch, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.01")
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSION_BURST", "1")
    master.open()
    waiting = [start(trigger_of(issue(broker, map_index=number))) for number in range(2)]
    dispatch(HOUR)
    await until(lambda: [each.waits_for for each in tickets_in(broker, State.SCHEDULED)] == [WaitsFor.RATE_LIMIT])
    master.close()
    dispatch(HOUR)
    await until(lambda: [each.waits_for for each in tickets_in(broker, State.SCHEDULED)] == [WaitsFor.CLUSTER])
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_a_trigger_survives_being_stored(broker: EmbeddedBroker) -> None:
    trigger = trigger_of(issue(broker), cluster_check="a.b", channel="other", delay_conn_id="c", hold="ledger")
    path, arguments = trigger.serialize()
    assert path == "airflow_delay_provider.triggers.spark.RetryTicketTrigger"
    assert json.loads(json.dumps(arguments)) == arguments
    stored: Any = json.loads(json.dumps(serialize(arguments)))
    assert RetryTicketTrigger(**deserialize(stored)).serialize() == trigger.serialize()
    assert datetime.fromisoformat(arguments["give_up_at"]).tzinfo is not None
