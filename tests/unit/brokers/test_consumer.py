"""A consumer that has nothing to do can be ended at any moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Event
from typing import Any

import pytest

from airflow_delay_provider.brokers.consumer import Consumed, Consumer, ConsumerConfig
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker


@pytest.fixture
def handle_signals() -> Iterator[Callable[[Callable[..., Any]], None]]:
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, handler) and None
    signal.signal(signal.SIGTERM, before)


class Interrupted(Event):
    """An event whose waiters are interrupted by a signal while they hold its lock."""

    def wait(self, timeout: float | None = None) -> bool:
        with self._cond:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)
        return super().wait(timeout)


class Idle(EmbeddedBroker):
    """An empty channel; a signal comes at the second look."""

    looks = 0

    def receive(self, *_: Any, **__: Any) -> list[Any]:
        self.looks += 1
        if self.looks == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return []


@pytest.mark.timeout(60)
def test_a_signal_handler_may_set_what_an_idle_consumer_looks_at(
    handle_signals: Callable[[Callable[..., Any]], None],
) -> None:
    """B23: a handler runs in the thread that it interrupts, and would wait for ever for what that one holds."""
    stop = Interrupted()
    handle_signals(lambda *_: stop.set())
    with Idle(Ledger("sqlite://")) as broker:
        config = ConsumerConfig(idle=timedelta(milliseconds=1))
        assert Consumer(broker, "orders", print, config=config).run(stop=stop) == Consumed()
