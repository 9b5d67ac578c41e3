"""Operators, triggers and sensors on a real ledger, once on SQLite and once on PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred
from sqlalchemy.engine import make_url

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.operators.control import CancelMessageOperator, RescheduleMessageOperator
from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
from airflow_delay_provider.sensors.message import MessageSensor
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from tests.databases import execute, require_postgres
from tests.waiting import until


@dataclass(frozen=True)
class TaskInstance:
    """What operators ask of a task instance."""

    dag_id: str = "invoices"
    run_id: str = "manual__2030-01-01"
    task_id: str = "remind"
    map_index: int = -1

    def xcom_push(self, key: str, value: Any) -> None:
        """Links are tested elsewhere."""


@pytest.fixture
def connected(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    define_connection(monkeypatch, ledger_url)
    return ledger_url


def define_connection(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    connection = {"conn_type": "delay", "extra": {"ledger_url": url}}
    monkeypatch.setenv("AIRFLOW_CONN_DELAY_DEFAULT", json.dumps(connection))


@contextmanager
def dispatching(url: str) -> Iterator[None]:
    """A real dispatcher in a thread."""
    config = DispatcherConfig(health_port=None)
    dispatcher = Dispatcher(Ledger(url), open_broker=lambda conn_id: DelayHook(conn_id).get_conn(), config=config)
    dispatcher.start()
    try:
        yield
    finally:
        dispatcher.stop()


def schedule(ti: TaskInstance, **options: Any) -> Any:
    context: Any = {"ti": ti}
    return ScheduleMessageOperator(task_id=ti.task_id, channel="invoices", **options).execute(context)


def deferred(ti: TaskInstance, **options: Any) -> Any:
    with pytest.raises(TaskDeferred) as request:
        schedule(ti, wait_for_dispatch=True, **options)
    return request.value.trigger


def expedite(message_ids: list[str]) -> None:
    RescheduleMessageOperator(task_id="expedite", message_ids=message_ids, expedite=True).execute({})


def known(url: str) -> int:
    ledger = Ledger(url)
    with ledger.read() as connection:
        total = sum(listing.count_by_state(connection).values())
    ledger.close()
    return total


async def test_a_waiting_task_goes_on_when_the_dispatcher_has_dispatched(connected: str) -> None:
    trigger = deferred(TaskInstance(), messages=[{"payload": each} for each in range(50)], deliver_after=3600)
    waiting = asyncio.create_task(anext(trigger.run()))
    with dispatching(connected):
        await asyncio.to_thread(expedite, trigger.message_ids)
        event = await asyncio.wait_for(waiting, timeout=120)

    assert event.payload["counts"] == {"dispatched": 50}
    assert all(outcome["lateness_ms"] >= 0 for outcome in event.payload["outcomes"].values())


async def test_the_same_task_tried_by_many_workers_at_once_schedules_once(connected: str) -> None:
    """A29, A42: tries that run at the same moment, as after a lost heartbeat."""
    messages = [{"payload": each} for each in range(20)]
    tries = [
        asyncio.to_thread(schedule, TaskInstance(), messages=messages, deliver_after=timedelta(hours=1))
        for _ in range(8)
    ]
    results = await asyncio.gather(*tries)

    assert all(ids == results[0] for ids in results)
    assert known(connected) == 20


async def test_mapped_tasks_schedule_side_by_side(connected: str) -> None:
    instances = [replace(TaskInstance(), map_index=index) for index in range(16)]
    ids = await asyncio.gather(*(asyncio.to_thread(schedule, ti, payload="x", deliver_after=3600) for ti in instances))

    assert len(set(ids)) == known(connected) == 16


async def test_a_cancelled_message_wakes_the_task_that_waits_for_it(connected: str) -> None:
    trigger = deferred(TaskInstance(), payload="x", deliver_after=3600)
    waiting = asyncio.create_task(anext(trigger.run()))
    await asyncio.to_thread(CancelMessageOperator(task_id="c", message_ids=trigger.message_ids).execute, {})

    event = await asyncio.wait_for(waiting, timeout=120)
    with pytest.raises(AirflowFailException, match="1 of 1 messages were not dispatched"):
        ScheduleMessageOperator(task_id="remind", channel="invoices", payload="x").execute_complete({}, event.payload)


def test_a_message_is_taken_by_one_of_many_sensors(connected: str) -> None:
    ids = schedule(TaskInstance(), messages=[{"payload": each} for each in range(5)])
    taken: list[str] = []

    def sense() -> None:
        sensor = MessageSensor(task_id="s", channel="invoices", deferrable=False, poke_interval=0.01, timeout=120)
        taken.append(sensor.execute({})["id"])

    threads = [threading.Thread(target=sense) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert sorted(taken) == sorted(ids)


async def test_waiting_tasks_survive_a_database_outage(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B34: every session is ended and new ones are refused for a while; then the task continues to wait."""
    define_connection(monkeypatch, postgres_url)
    quick = Backoff(initial=timedelta(milliseconds=50), cap=timedelta(milliseconds=50), floor=timedelta(0))
    monkeypatch.setattr(BrokerThread, "outage", quick)
    trigger = deferred(TaskInstance(), payload="x", deliver_after=3600)
    waiting = asyncio.create_task(anext(trigger.run()))
    await until(lambda: any(thread._has_polled for thread in BrokerThread._running.values()), seconds=60)
    (tail,) = BrokerThread._running.values()

    with closed_to_all(postgres_url):
        await until(lambda: tail._failures >= 3, seconds=60)
    with dispatching(postgres_url):
        await asyncio.to_thread(expedite, trigger.message_ids)
        event = await asyncio.wait_for(waiting, timeout=120)

    assert event.payload["counts"] == {"dispatched": 1}


@contextmanager
def closed_to_all(url: str) -> Iterator[None]:
    name = make_url(url).database
    server = require_postgres()
    execute(server, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
    execute(server, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    yield
    execute(server, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


def test_a_ledger_without_tables_says_how_to_make_them(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    define_connection(monkeypatch, empty_postgres_url)
    with pytest.raises(Exception, match="run `airflow delay db migrate`"):
        schedule(TaskInstance(), payload="x")


def test_the_embedded_broker_takes_its_database_from_the_connections_fields(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url(postgres_url)
    connection = {
        "conn_type": "delay",
        "host": url.host,
        "port": url.port,
        "login": url.username,
        "password": url.password,
        "schema": url.database,
    }
    monkeypatch.setenv("AIRFLOW_CONN_DELAY_DEFAULT", json.dumps(connection))
    schedule(TaskInstance(), payload="x", deliver_after=60)

    with EmbeddedBroker(Ledger(postgres_url)) as broker:
        assert "contains 1 messages" in broker.check()
