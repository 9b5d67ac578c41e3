"""The pytest plugin: fixtures for tests of DAGs that schedule messages.

Every pytest run with this package installed loads it, so it imports nothing but pytest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from airflow_delay_provider.testing.clock import SettableClock
    from airflow_delay_provider.testing.kit import DelayTestKit


@pytest.fixture
def delay_clock() -> SettableClock:
    """A clock with a fixed time until the test moves it."""
    from airflow_delay_provider.testing.clock import SettableClock

    return SettableClock()


@pytest.fixture
def delay_kit(delay_clock: SettableClock, tmp_path: Path) -> Iterator[DelayTestKit]:
    """The embedded broker on ``delay_clock`` and on a database of its own."""
    from airflow_delay_provider.testing.kit import DelayTestKit

    with DelayTestKit(f"sqlite:///{tmp_path / 'delay.db'}", clock=delay_clock) as kit:
        yield kit


@pytest.fixture
def delay_connection(delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the default connection, and the clock of every hook in this process, those of ``delay_kit``."""
    from airflow_delay_provider.domain.clock import SystemClock

    connection = {"conn_type": "delay", "extra": {"ledger_url": delay_kit.url}}
    monkeypatch.setenv("AIRFLOW_CONN_DELAY_DEFAULT", json.dumps(connection))
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", delay_kit.url)
    # Operators open their own hooks, so the clock is replaced where all of them read it.
    monkeypatch.setattr(SystemClock, "now", lambda _clock: delay_kit.clock.now())
    return "delay_default"
