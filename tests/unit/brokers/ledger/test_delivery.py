from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.ledger import channels, delivery, journal
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.ledger_held import LedgerHeldBroker
from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, State
from airflow_delay_provider.testing.clock import SettableClock
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, messages


def in_channel(ledger: Ledger, channel: str = "orders") -> list[str]:
    found = rows.read(ledger, lambda c: channels.peek(c, channel, limit=10_000, now_ms=NOW_MS))
    return [message.id for message in found]


def test_only_due_messages_are_ready_oldest_first_and_no_more_than_asked(ledger: Ledger):
    """B20, B26, B27, B46"""
    due = messages(0, -5, -10, -10)
    rows.insert(ledger, [*due, *messages(1, 1000)])
    in_order = [due[2].id, due[3].id, due[1].id, due[0].id]
    for n in (1, 2, 3, 4):
        assert rows.deliver(ledger, limit=1) == 1
        assert in_channel(ledger) == in_order[:n]
    assert rows.deliver(ledger) == 0


def test_a_dispatched_message_is_marked_with_its_time(ledger: Ledger):
    """B12, B20, B30, B46"""
    [stored] = messages(-10)
    rows.insert(ledger, [stored])
    rows.deliver(ledger)
    record = rows.get(ledger, stored)
    assert record.state is State.DISPATCHED
    assert record.dispatched_at == record.updated_at == from_ms(NOW_MS)


def test_messages_for_other_brokers_and_cancelled_ones_are_left_alone(ledger: Ledger):
    for_rabbit, cancelled = messages(-1, -1)
    rows.insert(ledger, [for_rabbit], destination="rabbit")
    rows.insert(ledger, [cancelled])
    rows.change(ledger, Change.CANCELLED, cancelled)
    assert rows.deliver(ledger) == 0


def test_the_next_due_time_is_that_of_the_earliest_waiting_message(ledger: Ledger):
    """B15, B20, B46"""

    def next_due(destination: str | None = None) -> int | None:
        return rows.read(ledger, lambda c: delivery.next_due_ms(c, destination=destination))

    assert next_due() is None
    later, sooner = messages(900, 500)
    rows.insert(ledger, [later, sooner])
    rows.insert(ledger, messages(100), destination="rabbit")
    assert next_due() == NOW_MS + 500
    assert next_due("rabbit") == NOW_MS + 100
    rows.change(ledger, Change.CANCELLED, sooner)
    assert next_due() == NOW_MS + 900
    rows.deliver(ledger, now_ms=NOW_MS + 900)
    assert next_due() is None


def test_dispatchers_side_by_side_deliver_each_message_once(ledger: Ledger):
    """B28, B32, B33, A29"""
    batch = messages(*range(-300, 0))
    rows.insert(ledger, batch)

    def work() -> int:
        moved = total = rows.deliver(ledger, limit=7)
        while moved:
            moved = rows.deliver(ledger, limit=7)
            total += moved
        return total

    with ThreadPoolExecutor(4) as pool:
        totals = [future.result() for future in [pool.submit(work) for _ in range(4)]]
    assert sum(totals) == 300
    assert in_channel(ledger) == [message.id for message in batch]
    assert rows.count(ledger) == {State.DISPATCHED: 300}


@pytest.mark.parametrize("destination", [None, "there"])
def test_a_requeued_message_does_not_come_a_fraction_of_a_millisecond_too_soon(ledger: Ledger, destination: str | None):
    """C9: due times are whole milliseconds, so they are rounded up."""
    clock = SettableClock(from_ms(NOW_MS) + timedelta(microseconds=900))
    target = EmbeddedBroker(Ledger("sqlite://"), clock=clock)
    broker: Broker = EmbeddedBroker(ledger, clock=clock)
    if destination is not None:
        broker = LedgerHeldBroker(ledger, destination, target, clock=clock)
    broker.send([rows.message(NOW_MS)])
    [delivered] = broker.receive("orders")
    broker.requeue(delivered, timedelta(milliseconds=10))
    assert rows.get(ledger, delivered.message).message.deliver_at == from_ms(NOW_MS + 11)
    target.close()


def test_the_journal_is_read_page_by_page(ledger: Ledger):
    """D11"""
    batch = messages(1, 2, 3)
    rows.insert(ledger, batch)
    rows.read_journal(ledger, 3)
    first = rows.read(ledger, lambda c: journal.read(c, after=FROM_THE_START, limit=2))
    second = rows.read(ledger, lambda c: journal.read(c, after=first[-1].position, limit=2))
    assert [entry.message_id for entry in [*first, *second]] == [each.id for each in batch]
    assert (len(first), len(second)) == (2, 1)
