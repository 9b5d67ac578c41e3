"""A connection that changes, hangs or is gone while its broker works."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.dispatcher import loop
from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection
from airflow_delay_provider.dispatcher.loop import LoopHealth
from airflow_delay_provider.domain.exceptions import ConfigurationError
from tools.servers.component import wait_for


class Vault:
    """Where connections are looked up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = "first"
        self.lookups = 0
        self.answers = threading.Event()
        self.answers.set()
        self.closed: list[Broker] = []

    def open(self, _conn_id: str) -> Broker:
        self.lookups += 1
        self.answers.wait()
        if not self.name:
            raise ConfigurationError("delay_conn_id: connection 'there' is not defined")
        broker = EmbeddedBroker(Ledger(f"sqlite:///{self.folder / self.name}"))
        close = broker.close
        broker.close = lambda: (close(), self.closed.append(broker))[0]  # type: ignore[method-assign]
        return broker


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path)


@pytest.fixture
def connection(vault: Vault) -> BrokerConnection:
    return BrokerConnection("there", vault.open, reread=timedelta(0))


def wait_until_looked_up(vault: Vault, connection: BrokerConnection, n: int) -> None:
    def is_done() -> bool:
        connection.get()
        return vault.lookups >= n

    wait_for(is_done, what=f"lookup number {n}", seconds=30, interval=0.005)


def test_a_broker_whose_connection_stays_the_same_is_kept(vault: Vault, connection: BrokerConnection) -> None:
    first = connection.get()
    wait_until_looked_up(vault, connection, 4)
    assert connection.get() is first
    assert first not in vault.closed
    assert vault.closed


def test_a_changed_connection_is_opened_and_the_old_broker_closed(vault: Vault, connection: BrokerConnection) -> None:
    """B36"""
    first = connection.get()
    vault.name = "second"
    wait_for(lambda: connection.get() is not first, what="the new broker", seconds=30, interval=0.005)
    assert first in vault.closed


def test_a_lookup_that_hangs_or_fails_keeps_the_broker_that_works(vault: Vault, connection: BrokerConnection) -> None:
    """B36: dispatch does not wait for a secrets backend."""
    first = connection.get()
    vault.answers.clear()
    wait_until_looked_up(vault, connection, 2)
    assert [connection.get() for _ in range(3)] == [first] * 3
    vault.name = ""
    vault.answers.set()
    wait_until_looked_up(vault, connection, 4)
    assert connection.get() is first
    connection.close()
    with pytest.raises(ConfigurationError, match="is not defined"):
        connection.get()


def test_a_loop_whose_first_run_does_not_end_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """B38: as one that hangs while its connection is looked up."""
    health = LoopHealth()
    assert health.well
    monkeypatch.setattr(loop, "STALLED_SECONDS", 0.0)
    assert not health.well
    assert "has not ended" in health.as_dict()["error"]
