from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from airflow_delay_provider.brokers.ledger import pruning, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.tables import event
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import UnknownMessageError
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, messages

DAY_MS = 86_400_000


def prune(ledger: Ledger, *, before_ms: int = NOW_MS + 1, limit: int = 100) -> int:
    rows.fold_all(ledger)
    return rows.prune(ledger, before_ms=before_ms, limit=limit)


@pytest.fixture
def broker(ledger: Ledger) -> EmbeddedBroker:
    return EmbeddedBroker(ledger, clock=SettableClock(from_ms(NOW_MS)))


def dispatched(broker: EmbeddedBroker, n: int) -> list[Message]:
    batch = messages(*[-1] * n)
    broker.schedule(batch)
    return batch


def test_messages_that_ended_are_removed_with_their_history(broker: EmbeddedBroker):
    """B66"""
    ledger = broker.ledger
    [cancelled] = messages(5)
    rows.insert(ledger, [cancelled])
    rows.change(ledger, Change.CANCELLED, cancelled)
    [handled] = dispatched(broker, 1)
    broker.ack(broker.receive("orders"))
    assert prune(ledger) == 2
    for gone in (cancelled, handled):
        with pytest.raises(UnknownMessageError):
            rows.get(ledger, gone)
    assert rows.count(ledger) == {}
    assert rows.read(ledger, lambda c: c.execute(select(func.count()).select_from(event)).scalar()) == 0


def test_waiting_messages_are_never_pruned(ledger: Ledger):
    rows.insert(ledger, messages(-10 * DAY_MS))
    assert prune(ledger, before_ms=NOW_MS + 100 * DAY_MS) == 0
    assert rows.count(ledger) == {State.SCHEDULED: 1}


def test_unread_messages_are_never_pruned(broker: EmbeddedBroker):
    """D18: nothing that waits or was not read is evicted."""
    unread, in_hand, dead = dispatched(broker, 3)
    first, second, third = broker.receive("orders", limit=3)
    broker.release([first])
    broker.dead_letter(third, channel="orders.dead", reason="bad")
    assert prune(broker.ledger, before_ms=NOW_MS + 100 * DAY_MS) == 0
    broker.ack([second])
    assert prune(broker.ledger, before_ms=NOW_MS + 100 * DAY_MS) == 1
    assert {rows.state(broker.ledger, message) for message in (unread, dead)} == {State.DISPATCHED, State.DEAD}
    with pytest.raises(UnknownMessageError):
        rows.get(broker.ledger, in_hand)


def test_recently_ended_messages_are_not_pruned(broker: EmbeddedBroker):
    dispatched(broker, 1)
    broker.ack(broker.receive("orders"))
    assert prune(broker.ledger, before_ms=NOW_MS) == 0
    assert prune(broker.ledger, before_ms=NOW_MS + 1) == 1


def test_no_more_than_asked_is_read_at_once(broker: EmbeddedBroker):
    """B29"""
    dispatched(broker, 5)
    broker.ack(broker.receive("orders", limit=5))
    rows.fold_all(broker.ledger)
    found: list[int] = []
    place: pruning.Place | None = pruning.Place()
    while place is not None:
        page = rows.read(
            broker.ledger, lambda c, place=place: pruning.find_old(c, place, before_ms=NOW_MS + 1, limit=2)
        )
        found.append(len(page.seqs))
        place = page.next
    assert found == [2, 2, 1, 0, 0]


def test_recent_messages_do_not_hide_old_ones_behind_them(broker: EmbeddedBroker):
    """A message cancelled long ago may be due after many that ended a moment ago."""
    ledger = broker.ledger
    [cancelled] = messages(1000 * DAY_MS)
    rows.insert(ledger, [cancelled])
    rows.change(ledger, Change.CANCELLED, cancelled)
    recent = messages(*range(1, 6))
    rows.insert(ledger, recent)
    for message in recent:
        ledger.transact(scheduling.change_waiting, [message.id], Change.CANCELLED, now_ms=NOW_MS + 10)
    assert prune(ledger, before_ms=NOW_MS + 1, limit=2) == 1
    with pytest.raises(UnknownMessageError):
        rows.get(ledger, cancelled)
    assert rows.count(ledger) == {State.CANCELLED: 5}


def test_a_message_that_is_requeued_after_it_was_found_is_not_deleted(broker: EmbeddedBroker):
    ledger = broker.ledger
    [message] = dispatched(broker, 1)
    broker.ack(broker.receive("orders"))
    rows.fold_all(ledger)
    found = rows.read(ledger, lambda c: pruning.find_old(c, pruning.Place(), before_ms=NOW_MS + 1, limit=10))
    assert len(found.seqs) == 1
    rows.insert(ledger, [message.requeued(from_ms(NOW_MS + 5))])
    assert ledger.transact(pruning.prune, found.state, found.seqs, before_ms=NOW_MS + 1) == 0
    assert rows.state(ledger, message) is State.SCHEDULED


def test_dispatched_messages_that_are_too_recent_are_not_even_read(ledger: Ledger):
    """B60: most of a large ledger is younger than the retention."""
    rows.insert(ledger, messages(*range(-50, 0)))
    rows.deliver(ledger)
    place = pruning.Place()
    found = rows.read(ledger, lambda c: pruning.find_old(c, place, before_ms=NOW_MS - 48, limit=10))
    assert found.next == pruning.Place(State.CANCELLED)


def test_a_reader_of_the_journal_goes_on_after_pruning(broker: EmbeddedBroker):
    """D11"""
    dispatched(broker, 1)
    position = broker.journal_end()
    broker.ack(broker.receive("orders"))
    prune(broker.ledger)
    assert broker.read_journal(after=position) == []
    [later] = messages(5)
    rows.insert(broker.ledger, [later])
    assert [entry.message_id for entry in rows.read_journal(broker.ledger, 1, after=position)] == [later.id]


def test_an_id_may_be_used_again_after_pruning(broker: EmbeddedBroker):
    [message] = dispatched(broker, 1)
    broker.ack(broker.receive("orders", visibility=timedelta(minutes=1)))
    prune(broker.ledger)
    assert rows.insert(broker.ledger, [message]) == [message.id]
