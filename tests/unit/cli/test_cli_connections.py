"""Where `airflow delay` finds its connection: the environment and Airflow's own database."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, inspect

from tests.unit.cli.commandline import CommandLine


@pytest.fixture
def stored_connection(sqlite_url: str) -> Iterator[str]:
    """A connection in Airflow's database, to the ledger of the test, which refuses what is due in less than an hour."""
    from airflow import settings
    from airflow.models import Connection

    existing = inspect(settings.engine).get_table_names()
    tables = [Connection.metadata.tables[name] for name in ("team", "connection") if name not in existing]
    Connection.metadata.create_all(settings.engine, tables=tables)
    with settings.NonScopedSession() as session:
        stored = Connection(conn_id="stored", conn_type="delay", extra={"ledger_url": sqlite_url, "min_delay": 3600})
        session.add(stored)
        session.commit()
        yield "stored"
        session.delete(stored)
        session.commit()
    Connection.metadata.drop_all(settings.engine, tables=tables)


def test_a_connection_in_airflows_database_is_found(delay: CommandLine, stored_connection: str) -> None:
    """A48: wired from the public entry point."""
    result = delay("schedule", "orders", "--payload", "x", "--after", "60", "--conn-id", stored_connection)
    assert (result.code, "less than min_delay" in result.err) == (2, True), result.err
    assert delay.document("schedule", "orders", "--payload", "x", "--after", "7200", "--conn-id", stored_connection)
    assert delay.counts()["SCHEDULED"] == 1


def test_reading_connections_leaves_the_environment_unchanged(delay: CommandLine) -> None:
    before = dict(os.environ)
    delay("status")
    assert dict(os.environ) == before


def test_the_default_is_not_taken_while_airflows_database_cannot_be_asked(
    delay: CommandLine, monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    """It may define another ledger: messages stored in the wrong one would never be dispatched."""
    from airflow import settings

    down = create_engine(f"postgresql+psycopg://nobody@127.0.0.1:{closed_port}/airflow")
    with monkeypatch.context() as patch:
        patch.setattr(settings, "engine", down)
        result = delay("schedule", "orders", "--payload", "x", "--after", "60")
        patch.setenv("AIRFLOW_CONN_DELAY_DEFAULT", "delay://")
        defined = delay("schedule", "orders", "--payload", "x", "--after", "60")
    assert result.code == 3
    assert "Airflow could not look up connection 'delay_default'" in result.err
    assert defined.code == 0
    assert delay.counts()["SCHEDULED"] == 1
