"""What a real RabbitMQ holds is listed, counted and shown by the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.monitoring import PrometheusObserver
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.project_journal import ProjectJournal
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Delivery, Message
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
            [delivery] = wait_for(lambda: broker.receive("orders"), what="a message", seconds=60, interval=0.05)
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
