"""An idle dispatcher sleeps until the database tells it that a message may be due."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import text

from airflow_delay_provider.brokers.ledger import delivery, notices
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.notices import Notices, PostgresNotices, open_notices
from airflow_delay_provider.brokers.port import Outcome
from airflow_delay_provider.dispatcher import loop
from airflow_delay_provider.dispatcher.dispatch_embedded import DispatchEmbedded
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS
from tools.servers.component import wait_for

SECOND = timedelta(seconds=1)
NO_LOOK_SECONDS = 3600.0


class Heard:
    """Counts notices."""

    def __init__(self) -> None:
        self.count = 0

    def note(self) -> None:
        self.count += 1

    def wait_for_more_than(self, count: int) -> None:
        wait_for(lambda: self.count > count, what="a notice", seconds=60, interval=0.005)


@contextmanager
def listening(ledger: Ledger) -> Iterator[tuple[Notices, Heard]]:
    heard = Heard()
    found = open_notices(ledger, on_notice=heard.note, interval=0.005)
    assert found is not None
    found.start()
    try:
        wait_for(lambda: found.is_listening and heard.count, what="a listener", seconds=60, interval=0.005)
        yield found, heard
    finally:
        found.stop()


def schedule(ledger: Ledger, delay: timedelta) -> Message:
    message = Message(channel="c", payload=b"", deliver_at=SystemClock().now() + delay)
    [receipt] = EmbeddedBroker(ledger).schedule([message])
    assert receipt.outcome is Outcome.SCHEDULED
    return message


def test_a_message_that_is_due_soon_is_announced(ledger: Ledger) -> None:
    """B24, B25"""
    with listening(ledger) as (_, heard):
        before = heard.count
        schedule(ledger, 4 * SECOND)
        heard.wait_for_more_than(before)


@pytest.mark.parametrize("change", [Change.EXPEDITED, Change.RESCHEDULED])
def test_a_message_that_is_moved_nearer_is_announced(ledger: Ledger, change: Change) -> None:
    waiting = rows.message(NOW_MS + 3_600_000)
    rows.insert(ledger, [waiting])
    with listening(ledger) as (_, heard):
        before = heard.count
        rows.change(ledger, change, waiting, deliver_at_ms=NOW_MS + 1000)
        heard.wait_for_more_than(before)


def test_a_message_that_could_not_be_sent_is_announced(ledger: Ledger) -> None:
    """B34"""
    rows.insert(ledger, rows.messages(-1), destination="rabbit")
    claims = ledger.transact(
        delivery.claim_due, destination="rabbit", owner="one", now_ms=NOW_MS, until_ms=NOW_MS + 1000, limit=1
    )
    with listening(ledger) as (_, heard):
        before = heard.count
        ledger.transact(delivery.give_back, claims, owner="one", now_ms=NOW_MS)
        heard.wait_for_more_than(before)


def test_messages_that_are_due_later_disturb_no_dispatcher_on_postgresql(postgres_url: str) -> None:
    ledger = Ledger(postgres_url)
    with listening(ledger) as (_, heard):
        before = heard.count
        schedule(ledger, timedelta(hours=1))
        # Notices arrive in the order of their transactions.
        schedule(ledger, 4 * SECOND)
        heard.wait_for_more_than(before)
        assert heard.count == before + 1
    ledger.close()


def test_a_lost_connection_wakes_dispatchers_and_is_opened_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B36: what was announced meanwhile is looked for."""
    monkeypatch.setattr(notices, "RETRY_SECONDS", 0.05)
    ledger = Ledger(postgres_url)
    with listening(ledger) as (listener, heard):
        before = heard.count
        end_sessions = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        with ledger.engine.begin() as connection:
            assert connection.execute(text(end_sessions)).scalar()
        # Once for the loss, and once for the new connection.
        heard.wait_for_more_than(before + 1)
        wait_for(lambda: listener.is_listening, what="a new connection", seconds=60, interval=0.005)
        before = heard.count
        schedule(ledger, 4 * SECOND)
        heard.wait_for_more_than(before)
    ledger.close()


def test_a_listener_that_does_not_hear_itself_does_not_count(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler between dispatcher and server may swallow notices."""

    class Swallowed(PostgresNotices):
        def _send(self, payload: str) -> None:
            if self._count.count > 1:
                super()._send(payload)

        _count = Heard()

    monkeypatch.setattr(notices, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(notices, "RETRY_SECONDS", 0.05)
    ledger = Ledger(postgres_url)
    listener = Swallowed(ledger, Swallowed._count.note)
    was_listening: list[bool] = []
    monkeypatch.setattr(
        listener, "_on_notice", lambda: (was_listening.append(listener.is_listening), listener._count.note())
    )
    listener.start()
    try:
        wait_for(lambda: listener.is_listening, what="a notice of its own", seconds=60, interval=0.005)
    finally:
        listener.stop()
    assert was_listening[:2] == [False, False]
    ledger.close()


@contextmanager
def dispatching(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Run a dispatcher that does not look by itself; yield the times of its runs."""
    monkeypatch.setattr(loop, "LOOK_SECONDS", NO_LOOK_SECONDS)
    runs: list[float] = []
    run_once = DispatchEmbedded.run_once

    def counted(self: DispatchEmbedded) -> float:
        runs.append(time.monotonic())
        return run_once(self)

    monkeypatch.setattr(DispatchEmbedded, "run_once", counted)
    config = DispatcherConfig(health_port=None)
    dispatcher = Dispatcher(ledger, open_broker=lambda _: EmbeddedBroker(ledger), config=config)
    dispatcher.start()
    try:
        wait_for(dispatcher._context.is_announced, what="a dispatcher that sleeps", seconds=60, interval=0.005)
        yield runs
    finally:
        assert dispatcher.stop()


def test_a_dispatcher_that_sleeps_delivers_what_is_scheduled_meanwhile(
    ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B24, B29"""
    with closing(Ledger(ledger_url)) as reader, dispatching(ledger, monkeypatch):
        broker = EmbeddedBroker(reader)
        for _ in range(2):
            schedule(reader, SECOND)
            wait_for(lambda: broker.receive("c"), what="the message", seconds=60, interval=0.01)


def test_an_idle_dispatcher_does_not_ask_postgresql_again_and_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dispatching(Ledger(postgres_url), monkeypatch) as runs:
        wait_for(lambda: runs and time.monotonic() - runs[-1] > 0.5, what="half a second without a run", seconds=60)
