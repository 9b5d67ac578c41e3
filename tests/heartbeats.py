"""Heartbeats of dispatchers that do not run, for tests of their readers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import update

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.heartbeats import (
    DispatcherRecord,
    Heartbeat,
    beat,
    read_dispatchers,
    this_machine,
)
from airflow_delay_provider.brokers.ledger.tables import dispatcher
from airflow_delay_provider.domain.clock import ONE_MS

WELL: Mapping[str, Any] = {"well": True, "succeeded_ms_ago": 20, "failures": 0, "error": None}
OWNER = "host-1:4711:abcdef"


def heartbeat(**fields: Any) -> Heartbeat:
    """A heartbeat of a dispatcher that is well."""
    ours = {
        "owner": OWNER,
        "machine": this_machine(),
        "pid": 4711,
        "version": "0.1.0",
        "loops": {"dispatch_embedded": WELL},
    }
    return Heartbeat(**ours | fields)


def write_heartbeat(ledger: Ledger, **fields: Any) -> None:
    """Write one heartbeat."""
    ledger.transact(lambda connection: beat(connection, heartbeat(**fields)))


def let_pass(ledger: Ledger, time: timedelta) -> None:
    """Make all heartbeats that were written so far older."""
    ledger.transact(lambda c: c.execute(update(dispatcher).values(seen_at_ms=dispatcher.c.seen_at_ms - time // ONE_MS)))


def dispatchers_of(ledger: Ledger) -> list[DispatcherRecord]:
    """All dispatchers that the ledger knows."""
    with ledger.read() as connection:
        return read_dispatchers(connection)
