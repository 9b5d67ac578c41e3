"""Warnings about missing dispatchers, by kind of broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.heartbeats import GONE_AFTER
from airflow_delay_provider.hooks.delay import DelayHook, find_dispatcher_warning, ledger_id_of
from tests.heartbeats import WELL, let_pass, write_heartbeat

SERVES_KAFKA = {"kafka_connections": ["stream"], "loops": {"dispatch_kafka:stream": WELL}}


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The configured ledger, and a connection of each kind."""
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", f"sqlite:///{tmp_path / 'ledger.db'}")
    own = {"ledger_url": f"sqlite:///{tmp_path / 'ledger.db'}"}
    for conn_id, fields in {
        "team": {"conn_type": "delay", "extra": own},
        "rabbit": {"conn_type": "rabbitmq", "host": "127.0.0.1"},
        "held": {"conn_type": "rabbitmq", "host": "127.0.0.1", "extra": {"hold": "ledger"}},
        "stream": {"conn_type": "delay_kafka", "host": "127.0.0.1"},
    }.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(fields))
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(file: Path) -> Iterator[Ledger]:
    with closing(Ledger(f"sqlite:///{file}")) as opened:
        opened.migrate()
        yield opened


def warning_for(conn_id: str, **options: Any) -> str | None:
    with closing(DelayHook(conn_id, **options)) as hook:
        return find_dispatcher_warning(hook)


def test_rabbitmq_needs_no_dispatcher_for_messages_that_it_holds(file: Path) -> None:
    assert warning_for("rabbit") is None
    with closing(DelayHook("rabbit")) as hook:
        assert ledger_id_of(hook) is None
    assert not file.exists()


def test_there_is_no_warning_for_kafka_without_a_ledger(file: Path) -> None:
    assert warning_for("stream") is None
    assert not file.exists()


def test_a_kafka_dispatcher_may_use_another_ledger(ledger: Ledger) -> None:
    write_heartbeat(ledger)
    found = warning_for("stream")
    assert found is not None
    assert "start one with `airflow delay dispatcher --kafka stream`, unless one runs with another ledger" in found
    write_heartbeat(ledger, owner="kafka", **SERVES_KAFKA)
    assert warning_for("stream") is None
    let_pass(ledger, GONE_AFTER)
    assert "no dispatcher that serves the ladder of 'stream' has been seen since" in (warning_for("stream") or "")


@pytest.mark.parametrize(
    ("conn_id", "options", "command"),
    [
        ("delay_default", {}, "airflow delay dispatcher"),
        ("team", {}, "airflow delay dispatcher --conn-id team"),
        ("held", {}, "airflow delay dispatcher --conn-id held"),
        ("rabbit", {"hold": "ledger"}, "airflow delay dispatcher"),
    ],
)
def test_the_command_is_the_one_for_this_ledger(
    ledger: Ledger, conn_id: str, options: dict[str, Any], command: str
) -> None:
    found = warning_for(conn_id, **options)
    assert found == (
        f"no dispatcher has ever been seen in this ledger; start one with `{command}` (ledger at {ledger.name})"
    )
    write_heartbeat(ledger)
    assert warning_for(conn_id, **options) is None


def test_a_ledger_that_cannot_be_read_is_no_reason_to_fail(ledger: Ledger) -> None:
    ledger.downgrade("0003")
    assert warning_for("team") is None
