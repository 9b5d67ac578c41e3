"""A dispatcher stops when asked, in any state of its loops and brokers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest

from airflow_delay_provider.brokers.ledger import scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.dispatcher import service
from airflow_delay_provider.dispatcher.loop import LoopThread
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import STOP_SECONDS, Dispatcher
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import SystemClock, floor_ms
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.message import Message
from tools.servers.component import wait_for

CONFIG = DispatcherConfig(health_port=None)


def refuse(conn_id: str) -> EmbeddedBroker:
    raise BrokerError(f"{conn_id} cannot be reached")


@pytest.fixture
def _signals() -> Iterator[None]:
    """A dispatcher leaves its handlers behind, since its process ends with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_all_loops_together_get_the_time_to_end_and_not_each(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B23"""
    seconds = 0.0

    def hang(_thread: LoopThread, timeout: float) -> bool:
        nonlocal seconds
        seconds += timeout
        return False

    dispatcher = Dispatcher(Ledger(sqlite_url), open_broker=refuse, config=CONFIG)
    dispatcher.start()
    with monkeypatch.context() as patch:
        patch.setattr(service, "time", SimpleNamespace(monotonic=lambda: seconds))
        patch.setattr(LoopThread, "join", hang)
        assert not dispatcher.stop()
    assert seconds == STOP_SECONDS
    assert dispatcher.stop()


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.timeout(60)
def test_a_signal_that_interrupts_it_at_any_moment_ends_it(sqlite_url: str, number: signal.Signals) -> None:
    """B23: also while the thread that handles signals holds a lock that others wait for."""

    class Interrupted(Dispatcher):
        def start(self) -> None:
            super().start()
            with self._stop._cond:  # type: ignore[attr-defined]
                os.kill(os.getpid(), number)

    assert Interrupted(Ledger(sqlite_url), open_broker=refuse, config=CONFIG).run_until_signalled()


def test_a_broker_that_does_not_close_cleanly_does_not_keep_the_dispatcher_from_ending(sqlite_url: str) -> None:
    """B36"""
    closed: list[EmbeddedBroker] = []

    class Stubborn(EmbeddedBroker):
        def close(self) -> None:
            super().close()
            closed.append(self)
            raise BrokerError("the connection is gone")

    opened: list[EmbeddedBroker] = []

    def open_broker(_conn_id: str) -> EmbeddedBroker:
        opened.append(Stubborn(Ledger("sqlite://")))
        return opened[-1]

    ledger = Ledger(sqlite_url)
    wait_in(ledger, "one", "another")
    dispatcher = Dispatcher(ledger, open_broker=open_broker, config=CONFIG)
    dispatcher.start()
    wait_for(lambda: len(opened) >= 2, what="brokers are opened", seconds=60, interval=0.02)
    assert dispatcher.stop()
    assert sorted(closed, key=id) == sorted(opened, key=id)


def wait_in(ledger: Ledger, *destinations: str) -> None:
    """Let a message wait for each of these connections."""
    now = SystemClock().now()
    for destination in destinations:
        message = Message(channel="c", payload=b"", deliver_at=now + timedelta(hours=1))
        ledger.transact(
            lambda connection, message=message, destination=destination: scheduling.insert(
                connection, [message], destination=destination, on_conflict=OnConflict.FAIL, now_ms=floor_ms(now)
            )
        )
