"""What ``/live``, ``/ready`` and ``/health`` say when a part of a dispatcher fails."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from airflow_delay_provider.brokers.ledger import heartbeats, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.dispatcher import loop
from airflow_delay_provider.dispatcher.housekeeping import Prune
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import SystemClock, floor_ms
from airflow_delay_provider.domain.exceptions import BrokerError, LedgerError
from airflow_delay_provider.domain.message import Message
from tools.servers.component import wait_for

PATHS = ("/live", "/ready", "/health")


def refuse(conn_id: str) -> EmbeddedBroker:
    raise BrokerError(f"{conn_id} cannot be reached")


@pytest.fixture
def dispatcher(sqlite_url: str) -> Iterator[Dispatcher]:
    """Not started yet."""
    made = Dispatcher(Ledger(sqlite_url), open_broker=refuse, config=DispatcherConfig(health_port=0))
    yield made
    made.stop()


def answer(dispatcher: Dispatcher, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{dispatcher.health_url}{path}", timeout=60) as found:
            return found.status, json.load(found)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def wait_until(dispatcher: Dispatcher, *statuses: int) -> None:
    def found() -> tuple[int, ...]:
        return tuple(answer(dispatcher, path)[0] for path in PATHS)

    wait_for(lambda: found() == statuses, what=f"{statuses} of {PATHS}", seconds=60, interval=0.05)


def test_a_broker_that_fails_is_no_reason_to_restart_or_replace_the_dispatcher(
    dispatcher: Dispatcher, sqlite_url: str
) -> None:
    dispatcher.start()
    wait_until(dispatcher, 200, 200, 200)
    ledger, now = Ledger(sqlite_url), SystemClock().now()
    waiting = Message(channel="c", payload=b"", deliver_at=now + timedelta(hours=1))
    ledger.transact(scheduling.insert, [waiting], destination="mq", on_conflict=OnConflict.FAIL, now_ms=floor_ms(now))
    ledger.close()
    wait_until(dispatcher, 200, 200, 503)
    assert not answer(dispatcher, "/health")[1]["loops"]["dispatch_to_brokers:mq"]["well"]


def test_a_ledger_that_fails_makes_the_dispatcher_unready_and_not_dead(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LedgerError("the database is down")

    monkeypatch.setattr(heartbeats, "beat", fail)
    dispatcher.start()
    wait_until(dispatcher, 200, 503, 503)
    # Loops that have not finished their first run are not ready either.
    wait_for(
        lambda: answer(dispatcher, "/ready")[1] == {"well": False, "loops": ["heartbeat"]},
        what="the heartbeat alone in /ready",
        seconds=60,
        interval=0.05,
    )
    monkeypatch.undo()
    wait_until(dispatcher, 200, 200, 200)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_has_died_needs_a_restart(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_loop: Prune) -> float:
        raise SystemExit

    monkeypatch.setattr(Prune, "run_once", die)
    dispatcher.start()
    wait_for(lambda: answer(dispatcher, "/live")[0] == 503, what="the dead loop in /live", seconds=60, interval=0.05)
    assert answer(dispatcher, "/live")[1] == {"well": False, "loops": ["prune"]}


def test_a_loop_that_hangs_needs_a_restart_after_a_while(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()

    def hang(_loop: Prune) -> float:
        hung.wait(60)
        return 1.0

    monkeypatch.setattr(Prune, "run_once", hang)
    dispatcher.start()
    wait_for(lambda: answer(dispatcher, "/live")[0] == 200, what="a start", seconds=60, interval=0.05)
    monkeypatch.setattr(loop, "HUNG_SECONDS", 0.5)
    wait_for(
        lambda: answer(dispatcher, "/live")[1]["loops"] == ["prune"],
        what="the hang in /live",
        seconds=60,
        interval=0.05,
    )
    hung.set()
    wait_until(dispatcher, 200, 200, 200)


def test_a_path_that_does_not_exist_names_those_that_do(dispatcher: Dispatcher) -> None:
    dispatcher.start()
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(f"{dispatcher.health_url}/healthz", timeout=60)
    with failed.value as error:
        assert error.read() == b"try /live, /ready, /health or /metrics\n"
