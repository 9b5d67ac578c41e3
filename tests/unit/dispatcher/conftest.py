"""A loop's context on a fresh ledger, with a clock that the test sets."""

from __future__ import annotations

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.testing.clock import SettableClock


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def context(ledger: Ledger, clock: SettableClock) -> Context:
    return Context(ledger=ledger, clock=clock, config=DispatcherConfig())
