"""Checks of a ledger after a measurement: all messages are in the expected state."""

from __future__ import annotations

from sqlalchemy import func, select

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.tables import channel_message, event, scheduled_message
from airflow_delay_provider.domain.lifecycle import State
from benchmarks.measurement import expect


def expect_ledger(url: str, *, scheduled: int, dispatched: int, in_channels: int, events: int) -> None:
    """Compare the rows with the expected ones, and the counts of the ledger with the rows."""
    ledger = Ledger(url)
    try:
        with ledger.read() as connection:
            state = scheduled_message.c.state
            rows = {
                State(value): n for value, n in connection.execute(select(state, func.count()).group_by(state)).all()
            }
            expect("messages that wait", rows.get(State.SCHEDULED, 0), scheduled)
            expect("dispatched messages", rows.get(State.DISPATCHED, 0), dispatched)
            expect("kept counts", {s: n for s, n in listing.count_by_state(connection).items() if n}, rows)
            in_tables = [
                connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (channel_message, event)
            ]
            expect("messages in channels and journal entries", in_tables, [in_channels, events])
    finally:
        ledger.close()


def dispatch_times(url: str) -> list[tuple[int, int]]:
    """Return when each dispatched message was due and was dispatched, in milliseconds, in the order of dispatch."""
    ledger = Ledger(url)
    message = scheduled_message.c
    query = (
        select(message.deliver_at_ms, message.dispatched_at_ms)
        .where(message.state == State.DISPATCHED.value)
        .order_by(message.dispatched_at_ms)
    )
    try:
        with ledger.read() as connection:
            return [(due, dispatched) for due, dispatched in connection.execute(query)]
    finally:
        ledger.close()
