"""Which message is due first, by who holds it."""

from __future__ import annotations

from airflow_delay_provider.brokers.ledger import delivery, overdue, projection, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.arguments import Hold, OnConflict
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry
from airflow_delay_provider.domain.message import Message
from tests.unit.brokers.ledger import rows

NOW_MS = 1_900_000_000_000


def insert(ledger: Ledger, due_ms: int, *, destination: str | None = None) -> None:
    message = Message(channel="c", payload=b"", deliver_at=from_ms(due_ms))
    ledger.transact(
        scheduling.insert, [message], destination=destination, on_conflict=OnConflict.FAIL, now_ms=NOW_MS - 9000
    )


def index(ledger: Ledger, due_ms: int, *, destination: str) -> None:
    message = Message(channel="c", payload=b"", deliver_at=from_ms(due_ms))
    entry = JournalEntry(
        message_id=message.id,
        change=Change.SCHEDULED,
        at=from_ms(NOW_MS - 9000),
        channel="c",
        deliver_at=message.deliver_at,
        position="1",
        message=message,
    )
    ledger.transact(projection.project, destination, [entry], after=FROM_THE_START, position="1")


def test_an_empty_ledger_has_nothing_that_is_due(ledger: Ledger) -> None:
    assert rows.read(ledger, overdue.first_due_ms) == {}


def test_messages_of_every_connection_count_for_who_holds_them(ledger: Ledger) -> None:
    """B41"""
    insert(ledger, NOW_MS + 5000)
    assert rows.read(ledger, overdue.first_due_ms) == {Hold.LEDGER: NOW_MS + 5000}
    index(ledger, NOW_MS - 7000, destination="rabbit")
    insert(ledger, NOW_MS + 1000, destination="kafka")
    insert(ledger, NOW_MS + 2000, destination="rabbit")
    assert rows.read(ledger, overdue.first_due_ms) == {Hold.LEDGER: NOW_MS + 1000, Hold.BROKER: NOW_MS - 7000}


def test_a_message_that_is_being_sent_is_not_dispatched_yet(ledger: Ledger) -> None:
    insert(ledger, NOW_MS, destination="kafka")
    claims = ledger.transact(
        delivery.claim_due, destination="kafka", owner="me", now_ms=NOW_MS, until_ms=NOW_MS + 60_000, limit=10
    )
    assert rows.read(ledger, overdue.first_due_ms) == {Hold.LEDGER: NOW_MS}
    ledger.transact(delivery.mark_dispatched, claims, now_ms=NOW_MS)
    assert rows.read(ledger, overdue.first_due_ms) == {}


def test_the_cost_does_not_grow_with_the_messages(sqlite_url: str) -> None:
    """Only the counts are scanned; messages are found in an index, which has all columns that are read."""
    ledger = Ledger(sqlite_url)
    with ledger.read() as connection:
        query = overdue.first_due_by_destination().compile(connection, compile_kwargs={"literal_binds": True})
        plan = [row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}")]
    ledger.close()
    lookups = [step for step in plan if "delay_scheduled_message" in step]
    assert len(lookups) == 2
    assert all("USING COVERING INDEX" in step and step.startswith("SEARCH") for step in lookups)
