"""A broker of another type for tests of the Airflow surface: its channels are not in the configured ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import Connection

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.arguments import Limits
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.hooks import connections


class ElsewhereBroker(EmbeddedBroker):
    """Stands for a broker that holds messages by itself."""


def define_elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path, **extra: Any) -> str:
    """Define a connection of the type ``elsewhere`` and return its id."""

    def open_elsewhere(connection: Connection | None, clock: Clock | None) -> ElsewhereBroker:
        assert connection is not None
        limits = Limits.from_settings(connection.extra_dejson)
        return ElsewhereBroker(Ledger(f"sqlite:///{folder / 'elsewhere.db'}"), limits=limits, clock=clock)

    monkeypatch.setitem(connections._BROKERS, "elsewhere", open_elsewhere)
    # With a host, which is that of the broker and not of the ledger.
    connection = {"conn_type": "elsewhere", "host": "broker.example", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_FAR", json.dumps(connection))
    return "far"
