"""What a real RabbitMQ holds is listed, counted and shown by the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.monitoring import PrometheusObserver
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.project_journal import ProjectJournal
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.lifecycle import TIME_UNKNOWN, Change, JournalEntry, State
from airflow_delay_provider.domain.message import Delivery, Message
from tests.integration.rabbitmq_scene import ON_TIME, Scene
from tests.rabbits import config_of, declare_queue, fresh_vhost
from tools.servers.component import wait_for


@pytest.fixture
def rabbit() -> Iterator[str]:
    with fresh_vhost() as url:
        for name in ("orders", "orders.dead"):
            declare_queue(url, name)
        yield url


def test_messages_that_rabbitmq_holds_are_followed_from_schedule_to_dead_letter(ledger: Ledger, rabbit: str) -> None:
    """A23, A25, A45, B14, B39, B41"""
    config = config_of(rabbit, tick=0.1)
    measured = PrometheusObserver()
    context = Context(ledger=ledger, clock=SystemClock(), config=DispatcherConfig(), observers=[measured])
    loop = ProjectJournal(context, "rabbit", lambda _: RabbitMQBroker(config))

    def states() -> dict[State, int]:
        loop.run_once()
        with ledger.read() as connection:
            return {state: n for state, n in listing.count_by_state(connection, destination="rabbit").items() if n}

    def wait_until(expected: dict[State, int]) -> None:
        wait_for(lambda: states() == expected, what=f"{expected} in the ledger", seconds=60, interval=0.05)

    with RabbitMQBroker(config) as broker:
        # What takes its time is done before a message is about to be due.
        broker.create_topology(["orders", "orders.dead"])

        def receive() -> Delivery:
            # RabbitMQ 3.10 does not record when it dispatches, so the journal is read all the time.
            [delivery] = wait_for(
                lambda: states() and broker.receive("orders"), what="a message", seconds=60, interval=0.05
            )
            return delivery

        soon, late = (
            Message(
                channel="orders", payload=b"hello", deliver_at=broker.clock.now() + timedelta(seconds=after), key="k"
            )
            for after in (1.5, 600)
        )
        broker.schedule([soon, late])
        wait_for(lambda: sum(states().values()) == 2, what="both in the ledger", seconds=60, interval=0.05)
        with ledger.read() as connection:
            assert [record.message.id for record in listing.page(connection, destination="rabbit").records] == [
                soon.id,
                late.id,
            ]
            assert listing.get(connection, late.id).message == late
        delivery = receive()
        wait_until({State.SCHEDULED: 1, State.DISPATCHED: 1})
        broker.requeue(delivery, timedelta(seconds=0.3), reason="later")
        broker.dead_letter(receive(), channel="orders.dead", reason="bad")
        wait_until({State.SCHEDULED: 1, State.DEAD: 1})
    loop.close()
    with ledger.read() as connection:
        history = listing.get_history(connection, soon.id)
        assert listing.get(connection, soon.id).message.handled_count == 1
    assert [entry.change for entry in history] == [
        Change.SCHEDULED,
        Change.DISPATCHED,
        Change.REQUEUED,
        Change.DISPATCHED,
        Change.DEAD_LETTERED,
    ]
    assert [entry.reason for entry in history] == [None, None, "later", None, "bad"]
    assert all(entry.lateness >= timedelta(0) for entry in history if entry.change is Change.DISPATCHED)
    assert 'delay_dispatched_total{channel="orders"} 2.0' in measured.render().decode()
    assert "delay_lateness_seconds_count 2.0" in measured.render().decode()


@pytest.fixture
def scene(rabbitmq_version: str) -> Iterator[Scene]:
    with fresh_vhost() as url, Scene(url) as opened:
        yield opened


def follow(scene: Scene, ledger: Ledger) -> None:
    """Read the journal to its end, as a dispatcher does."""
    context = Context(ledger=ledger, clock=SystemClock(), config=DispatcherConfig())
    loop = ProjectJournal(context, "rabbit", lambda _: scene.open())
    try:
        while loop.run_once() == 0.0:
            pass
    finally:
        loop.close()


def test_a_journal_that_is_read_late_shows_no_wrong_lateness(scene: Scene, rabbitmq_version: str, sqlite_url: str):
    """RabbitMQ 4 records the second of a dispatch, 3.10 nothing."""
    ledger = Ledger(sqlite_url)
    message = scene.message(scene.queue(), after=1)
    scene.broker.schedule([message])
    [arrival] = scene.collect(message.channel, 1)
    late = arrival.at + timedelta(seconds=4)
    wait_for(lambda: datetime.now(UTC) > late, what="the dispatch is a while ago", seconds=60, interval=0.05)

    def is_dispatched() -> bool:
        follow(scene, ledger)
        with ledger.read() as connection:
            return listing.count_by_state(connection)[State.DISPATCHED] == 1

    wait_for(is_dispatched, what="the dispatch in the ledger", seconds=60, interval=0.05)
    with ledger.read() as connection:
        record, entry = listing.get(connection, message.id), listing.get_history(connection, message.id)[-1]
    if rabbitmq_version == "rabbitmq3":
        assert (record.dispatched_at, record.lateness, entry.lateness) == (None, None, None)
        assert entry.reason == TIME_UNKNOWN
    else:
        assert record.dispatched_at is not None
        assert message.deliver_at <= record.dispatched_at <= arrival.at + timedelta(seconds=1)
    ledger.close()


def test_a_late_dispatch_that_is_read_at_once_is_measured(scene: Scene) -> None:
    late_by = timedelta(seconds=4)
    message = scene.message(scene.queue(), after=1)
    end = scene.broker.journal_end()
    scene.schedule_in_time([message], now=datetime.now(UTC) - late_by)
    entries: list[JournalEntry] = []

    def is_dispatched() -> bool:
        entries.extend(scene.broker.read_journal(after=entries[-1].position if entries else end))
        return any(entry.change is Change.DISPATCHED for entry in entries)

    wait_for(is_dispatched, what="the dispatch in the journal", seconds=60, interval=0.05)
    lateness = entries[-1].lateness
    assert lateness is not None
    assert late_by <= lateness < late_by + ON_TIME
