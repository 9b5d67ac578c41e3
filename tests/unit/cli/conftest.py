"""A command line on a fresh SQLite ledger, and connections with limits of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.cli.commandline import CommandLine
from tools.servers.process import free_port

Define = Callable[..., str]


@pytest.fixture
def delay(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> CommandLine:
    """`airflow delay` on a fresh ledger."""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", sqlite_url)
    return CommandLine(capfd)


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Define:
    """Defines a connection to the ledger of ``delay`` with other settings, or to a server, and returns its id."""

    def define_connection(*, host: str | None = None, port: int | None = None, **extra: Any) -> str:
        connection = {"conn_type": "delay", "host": host, "port": port, "extra": extra}
        monkeypatch.setenv("AIRFLOW_CONN_OTHER", json.dumps(connection))
        return "other"

    return define_connection


@pytest.fixture
def closed_port() -> int:
    """A port that nothing listens on."""
    return free_port()


@pytest.fixture
def nothing_waits(delay: CommandLine) -> Callable[[], None]:
    """Asserts that the ledger has no message at all."""

    def check() -> None:
        assert delay.counts() == {"SCHEDULED": 0, "DISPATCHED": 0, "CANCELLED": 0, "DEAD": 0}

    return check
