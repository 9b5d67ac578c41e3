from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import ConflictError, LifecycleError, UnknownMessageError
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Origin
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, message, messages

FULL = message(
    id="order-1",
    payload=b"\x00\xff",
    key="customer",
    headers={"a": "1", "ü": "\"'{}"},
    content_type="application/json",
    priority=9,
    handled_count=2,
    origin=Origin(dag_id="bills", run_id="r", task_id="t", map_index=4),
)


def test_a_message_is_read_back_as_it_was_stored(ledger: Ledger):
    """B7, B12, B16, B20, B46"""
    for stored in (FULL, message(), message(payload=b"")):
        assert rows.insert(ledger, [stored], destination="rabbit") == [stored.id]
        record = rows.get(ledger, stored)
        assert record.message == stored
        assert (record.state, record.destination, record.generation) == (State.SCHEDULED, "rabbit", 0)
        assert record.scheduled_at == record.updated_at == from_ms(NOW_MS)
        assert record.dispatched_at is None
        assert record.lateness is None


def test_messages_of_every_shape_can_be_stored_together(ledger: Ledger):
    """B46: columns that all rows share and columns that differ take different ways."""
    batch = [FULL, message(), message(key="k"), message(headers={"x": "y"}), message(priority=1)]
    rows.insert(ledger, batch)
    for stored in batch:
        assert rows.get(ledger, stored).message == stored


def test_a_large_batch_is_stored_in_the_order_it_was_given(ledger: Ledger):
    """B53"""
    batch = messages(*[5] * 2000)
    assert rows.insert(ledger, batch) == [stored.id for stored in batch]
    assert rows.ids(rows.page(ledger, size=1000).records) == [stored.id for stored in batch[:1000]]


def test_an_unknown_message_is_not_found(ledger: Ledger):
    """B13, B46"""
    with pytest.raises(UnknownMessageError, match="'nothing'"):
        rows.read(ledger, lambda c: listing.get(c, "nothing"))


@pytest.mark.parametrize("policy", OnConflict)
def test_a_taken_id_anywhere_in_a_batch_meets_the_policy(ledger: Ledger, policy: OnConflict):
    """A28, B6, B46"""
    for taken in (0, 2, 4):
        batch = messages(1, 2, 3, 4, 5)
        rows.insert(ledger, [replace(batch[taken], payload=b"first")])
        before = rows.count(ledger)[State.SCHEDULED]
        if policy is OnConflict.FAIL:
            with pytest.raises(ConflictError, match=batch[taken].id):
                rows.insert(ledger, batch, on_conflict=policy)
            assert rows.count(ledger) == {State.SCHEDULED: before}
            continue
        fresh = rows.insert(ledger, batch, on_conflict=policy)
        kept = {batch[taken].id} if policy is OnConflict.KEEP else set()
        assert set(fresh) == {stored.id for stored in batch} - kept
        payload = b"first" if policy is OnConflict.KEEP else b"{}"
        assert rows.get(ledger, batch[taken]).message.payload == payload
        assert rows.count(ledger) == {State.SCHEDULED: before + 4}


def test_a_message_that_comes_back_with_a_higher_count_waits_again(ledger: Ledger):
    """A23: a consumer of another broker puts it back through the ledger."""
    first = message(NOW_MS)
    rows.insert(ledger, [first])
    rows.deliver(ledger)
    again = first.requeued(from_ms(NOW_MS + 500))
    assert rows.insert(ledger, [again]) == [first.id]
    record = rows.get(ledger, first)
    assert (record.message, record.state) == (again, State.SCHEDULED)
    assert record.dispatched_at is None, "it waits, so it was not dispatched yet"
    assert rows.count(ledger) == {State.SCHEDULED: 1}
    assert rows.insert(ledger, [again]) == []


def test_replacing_and_moving_raise_the_generation(ledger: Ledger):
    """A27"""
    stored = message()
    rows.insert(ledger, [stored])
    rows.insert(ledger, [stored], on_conflict=OnConflict.REPLACE)
    rows.change(ledger, Change.RESCHEDULED, stored, deliver_at_ms=NOW_MS + 7)
    rows.change(ledger, Change.EXPEDITED, stored, deliver_at_ms=NOW_MS)
    record = rows.get(ledger, stored)
    assert record.generation == 3
    assert record.message.deliver_at == from_ms(NOW_MS)


@pytest.mark.parametrize("change", [Change.CANCELLED, Change.RESCHEDULED, Change.EXPEDITED])
def test_a_message_that_is_being_sent_cannot_be_called_back(ledger: Ledger, change: Change):
    """B22, A29"""
    from airflow_delay_provider.brokers.ledger import delivery

    stored = message(NOW_MS)
    rows.insert(ledger, [stored], destination="rabbit")
    ledger.transact(
        lambda c: delivery.claim_due(c, destination="rabbit", owner="me", now_ms=NOW_MS, until_ms=NOW_MS + 1, limit=1)
    )
    with pytest.raises(LifecycleError, match="is being dispatched"):
        rows.change(ledger, change, stored, deliver_at_ms=NOW_MS)
    with pytest.raises(ConflictError, match="is being dispatched"):
        rows.insert(ledger, [stored], destination="rabbit", on_conflict=OnConflict.REPLACE)


def test_the_history_has_each_step_of_a_message(ledger: Ledger):
    """A45"""
    stored = message()
    rows.insert(ledger, [stored])
    rows.change(ledger, Change.RESCHEDULED, stored, deliver_at_ms=NOW_MS)
    rows.deliver(ledger, now_ms=NOW_MS + 3)
    history = rows.read(ledger, lambda c: listing.get_history(c, stored.id))
    assert [entry.change for entry in history] == [Change.SCHEDULED, Change.RESCHEDULED, Change.DISPATCHED]
    assert history[-1].lateness == timedelta(milliseconds=3)
    assert rows.get(ledger, stored).lateness == timedelta(milliseconds=3)
