"""A ledger behind the default connection, and the little of a task instance that operators use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.clock import ceil_ms


@dataclass
class TaskInstance:
    """What operators ask of a task instance."""

    dag_id: str = "invoices"
    run_id: str = "manual__2030-01-01"
    task_id: str = "remind"
    map_index: int | None = -1
    try_number: int = 1
    pushed: dict[str, Any] = field(default_factory=dict)

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value


@pytest.fixture
def ti() -> TaskInstance:
    return TaskInstance()


@pytest.fixture
def context(ti: TaskInstance) -> Any:
    return {"ti": ti}


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Define a connection of type ``delay`` on a ledger."""

    def define(url: str, conn_id: str = "delay_default", **extra: Any) -> None:
        connection = {"conn_type": "delay", "extra": {"ledger_url": url, **extra}}
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(connection))

    return define


@pytest.fixture
def broker(sqlite_url: str, connect: Callable[..., None]) -> Iterator[EmbeddedBroker]:
    """The broker of the default connection."""
    connect(sqlite_url)
    with EmbeddedBroker(Ledger(sqlite_url)) as opened:
        yield opened


@pytest.fixture
def dispatch(broker: EmbeddedBroker) -> Callable[..., int]:
    """Dispatch messages that are due ``ahead`` from now, and return how many."""

    def run(ahead: timedelta = timedelta(0)) -> int:
        now_ms = ceil_ms(broker.clock.now() + ahead)
        return len(broker.ledger.transact(lambda c: delivery.deliver_due(c, now_ms=now_ms, limit=10_000)))

    return run
