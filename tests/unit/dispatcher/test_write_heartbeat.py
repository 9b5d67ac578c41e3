"""The loop that reports that a dispatcher runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.heartbeats import GONE_AFTER, INTERVAL
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.dispatcher.loop import Context, LoopThread
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.dispatcher.write_heartbeat import WriteHeartbeat
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.testing.clock import SettableClock
from tests.heartbeats import dispatchers_of, let_pass
from tools.servers.component import wait_for


def test_a_killed_dispatcher_is_gone_within_15_seconds_and_three_lost_heartbeats_are_no_alarm():
    assert timedelta(seconds=15) >= GONE_AFTER + INTERVAL
    assert GONE_AFTER > 3 * INTERVAL


@pytest.mark.parametrize("ahead", [timedelta(seconds=90), timedelta(seconds=-90)])
def test_a_heartbeat_tells_how_far_the_clock_of_the_dispatcher_is_ahead(ledger: Ledger, ahead: timedelta):
    clock = SettableClock(datetime.now(UTC) + ahead)
    loop = WriteHeartbeat(Context(ledger=ledger, clock=clock, config=DispatcherConfig()), dict)
    assert loop.run_once() == INTERVAL.total_seconds()
    [found] = dispatchers_of(ledger)
    assert found.clock_skew == pytest.approx(ahead, abs=timedelta(seconds=5))
    clock.set(datetime.now(UTC))
    loop.run_once()
    [found] = dispatchers_of(ledger)
    assert found.clock_skew == pytest.approx(timedelta(0), abs=timedelta(seconds=5))


def test_a_heartbeat_that_comes_late_is_no_alarm_before_the_limit(ledger: Ledger):
    """As when another writer holds the database for seconds."""
    loop = WriteHeartbeat(Context(ledger=ledger, clock=SettableClock(), config=DispatcherConfig()), dict)
    loop.run_once()
    let_pass(ledger, GONE_AFTER - timedelta(seconds=2))
    [waiting] = dispatchers_of(ledger)
    assert waiting.is_alive
    let_pass(ledger, timedelta(seconds=2))
    [gone] = dispatchers_of(ledger)
    assert not gone.is_alive
    loop.run_once()
    [back] = dispatchers_of(ledger)
    assert back.is_alive


def test_after_an_outage_of_the_database_the_next_heartbeat_is_not_put_off(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
):
    caps: dict[str, timedelta] = {}
    start = LoopThread.start

    def note_backoff(thread: LoopThread) -> None:
        caps[thread.loop.name] = thread._backoff.cap
        start(thread)

    monkeypatch.setattr(LoopThread, "start", note_backoff)
    backoff = Backoff(initial=timedelta(seconds=5), cap=timedelta(seconds=30))
    config = DispatcherConfig(health_port=None, backoff=backoff)
    dispatcher = Dispatcher(Ledger(sqlite_url), open_broker=_open_none, config=config)
    dispatcher.start()
    wait_for(lambda: "heartbeat" in caps, what="all loops", seconds=30)
    assert dispatcher.stop()
    assert caps.pop("heartbeat") == INTERVAL
    assert set(caps.values()) == {timedelta(seconds=30)}


def _open_none(conn_id: str) -> Broker:
    raise AssertionError(conn_id)
