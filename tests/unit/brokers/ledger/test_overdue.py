"""Which message is due first, by who holds it."""

from __future__ import annotations

from airflow_delay_provider.brokers.ledger import delivery, overdue, projection, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED
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
    assert rows.read(ledger, overdue.first_due_by_connection) == {
        (Hold.LEDGER, EMBEDDED): NOW_MS + 5000,
        (Hold.LEDGER, "kafka"): NOW_MS + 1000,
        (Hold.LEDGER, "rabbit"): NOW_MS + 2000,
        (Hold.BROKER, "rabbit"): NOW_MS - 7000,
    }


def test_a_message_that_is_being_sent_is_not_dispatched_yet(ledger: Ledger) -> None:
    insert(ledger, NOW_MS, destination="kafka")
    claims = ledger.transact(
        delivery.claim_due, destination="kafka", owner="me", now_ms=NOW_MS, until_ms=NOW_MS + 60_000, limit=10
    )
    assert rows.read(ledger, overdue.first_due_ms) == {Hold.LEDGER: NOW_MS}
    ledger.transact(delivery.mark_dispatched, claims, now_ms=NOW_MS)
    assert rows.read(ledger, overdue.first_due_ms) == {}


def test_neighbours_in_the_index_are_not_mistaken_for_messages_of_a_connection(ledger: Ledger) -> None:
    """The counts name connections whose scheduled messages only the broker, or only the ledger, holds."""
    index(ledger, NOW_MS + 1, destination="a")
    insert(ledger, NOW_MS + 2, destination="b")
    index(ledger, NOW_MS + 3, destination="c")
    assert rows.read(ledger, overdue.first_due_ms) == {Hold.LEDGER: NOW_MS + 2, Hold.BROKER: NOW_MS + 1}


def test_a_lookup_reads_one_entry_of_the_index(ledger: Ledger) -> None:
    """B60: whatever the database assumes about the messages."""
    for n in range(3):
        index(ledger, NOW_MS + n, destination=f"rabbit{n}")
    with ledger.read() as connection:
        query = overdue.seek("rabbit1", 0).compile(connection, compile_kwargs={"literal_binds": True})
        if connection.dialect.name == "sqlite":
            [step] = [row.detail for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}")]
            assert "USING COVERING INDEX ix_delay_scheduled_message_destination" in step
            assert step.endswith("((destination,held_by_broker,state,deliver_at_ms)>(?,?,?,?))")
            return
        # So few rows are otherwise read at once.
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        connection.exec_driver_sql("SET LOCAL enable_bitmapscan = off")
        plan = "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN (COSTS OFF) {query}"))
    assert "Index Only Scan using ix_delay_scheduled_message_destination" in plan
    assert "Sort" not in plan
