"""Dead rows are replayed in batches, once each, even by concurrent callers."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from airflow_delay_provider.brokers.ledger import delivery, embedded, listing
from airflow_delay_provider.brokers.ledger import replay as replaying
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.tables import event, scheduled_message
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.dead_letters import DeadLetters
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock
from tests.contract.harness import run_together
from tests.unit.brokers.ledger.rows import NOW_MS, deliver, insert, message, read

ALL = DeadLetters(channel="orders")
THERE = "there"


def die(ledger: Ledger, batch: list[Message], *, reason: str = "too large", at_ms: int = NOW_MS) -> None:
    """The dispatcher gives these up, which wait for another broker."""
    claims = ledger.transact(
        lambda c: delivery.claim_due(
            c, destination=THERE, owner="me", now_ms=NOW_MS + 10_000, until_ms=NOW_MS + 60_000, limit=10_000
        )
    )
    wanted = {each.id for each in batch}
    dead = [claim for claim in claims if claim.message.id in wanted]
    ledger.transact(lambda c: delivery.mark_dead(c, dead, now_ms=at_ms, reason=reason))


def dead(ledger: Ledger, n: int) -> list[Message]:
    batch = [message() for _ in range(n)]
    insert(ledger, batch, destination=THERE)
    die(ledger, batch)
    return batch


def replay(ledger: Ledger, selection: DeadLetters = ALL, *, limit: int = 10_000, now_ms: int = NOW_MS) -> list[str]:
    rows = ledger.transact(
        lambda c: replaying.replay(c, selection, destination=THERE, now_ms=now_ms, died_until_ms=now_ms, limit=limit)
    )
    return [row.id for row in rows]


def require_counts_in_step(ledger: Ledger) -> Counter[State]:
    rows = read(
        ledger,
        lambda c: c.execute(select(scheduled_message.c.state, func.count()).group_by(scheduled_message.c.state)).all(),
    )
    real = Counter({State(state): n for state, n in rows})
    assert real == Counter({state: n for state, n in read(ledger, listing.count_by_state).items() if n})
    return real


def test_messages_of_a_dispatcher_are_replayed_in_batches_with_journal_and_counts(ledger: Ledger) -> None:
    """A25, B60"""
    batch = dead(ledger, 25)
    assert [len(replay(ledger, limit=10)) for _ in range(4)] == [10, 10, 5, 0]
    assert require_counts_in_step(ledger) == {State.SCHEDULED: 25}
    reasons = read(
        ledger, lambda c: c.execute(select(event.c.reason).where(event.c.change == Change.REQUEUED)).scalars()
    )
    assert list(reasons) == ["replayed"] * len(batch)
    assert read(ledger, lambda c: delivery.next_due_ms(c, destination=THERE)) == NOW_MS


def test_a_replayed_message_leaves_the_dead_letters_at_once_and_starts_with_a_count_of_none(ledger: Ledger) -> None:
    """A25: a consumer of the dead letters must not receive it before it is dispatched again."""
    broker = EmbeddedBroker(ledger, clock=SettableClock(from_ms(NOW_MS)))
    sent = message(NOW_MS)
    broker.send([sent])
    [first] = broker.receive("orders")
    broker.requeue(first, timedelta(0))
    deliver(ledger)
    [second] = broker.receive("orders")
    assert second.message.handled_count == 1
    broker.dead_letter(second, channel="orders.dead", reason="bad")
    assert broker.replay(ALL).count == 1
    assert broker.receive("orders.dead") == []
    deliver(ledger)
    assert [each.message.handled_count for each in broker.receive("orders")] == [0]


def test_replays_and_schedules_at_the_same_moment_count_each_message_once(ledger: Ledger) -> None:
    """B33, B35"""
    batch = dead(ledger, 40)
    results = run_together(
        [
            lambda: len(replay(ledger)),
            lambda: len(insert(ledger, batch, destination=THERE)),
            lambda: len(replay(ledger)),
            lambda: len(insert(ledger, batch[::-1], destination=THERE)),
        ]
    )
    assert sum(n for n in results if isinstance(n, int)) == len(batch), results
    assert require_counts_in_step(ledger) == {State.SCHEDULED: 40}


def test_only_the_last_reason_counts(ledger: Ledger) -> None:
    batch = dead(ledger, 1)
    replay(ledger)
    die(ledger, batch, reason="a header is too long")
    assert replay(ledger, DeadLetters(reason="too large")) == []
    assert replay(ledger, DeadLetters(reason="too long")) == [batch[0].id]


def test_a_reason_is_found_as_it_is_written(ledger: Ledger) -> None:
    """As a text and not as a pattern, on both databases."""
    batch = [message()]
    insert(ledger, batch, destination=THERE)
    die(ledger, batch, reason="100% of Queue")
    for text in ("queue", "100_", "%Queue"):
        assert replay(ledger, DeadLetters(reason=text)) == []
    assert replay(ledger, DeadLetters(reason="0% of Q")) == [batch[0].id]


def test_messages_that_are_dead_lettered_again_meanwhile_are_not_replayed_for_ever(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A25"""
    monkeypatch.setattr(embedded, "REPLAY_BATCH", 1)
    batch = dead(ledger, 3)
    clock = SettableClock(from_ms(NOW_MS + 1))
    broker = EmbeddedBroker(ledger, clock=clock)
    broker.destination = THERE
    transact = ledger.transact

    def die_at_once(*args: Any, **kwargs: Any) -> Any:
        rows = transact(*args, **kwargs)
        clock.advance(clock.now() - from_ms(NOW_MS))
        monkeypatch.setattr(ledger, "transact", transact)
        die(ledger, batch, at_ms=NOW_MS + 1000)
        monkeypatch.setattr(ledger, "transact", die_at_once)
        return rows

    monkeypatch.setattr(ledger, "transact", die_at_once)
    assert broker.replay(ALL).count == 3


def test_broker_held_messages_are_not_sent_from_the_ledger(ledger: Ledger) -> None:
    """The ledger only follows it, perhaps without its content."""
    dead(ledger, 1)
    ledger.transact(lambda c: c.execute(update(scheduled_message).values(held_by_broker=1)))
    assert replay(ledger) == []
    assert read(ledger, lambda c: replaying.count(c, ALL, destination=THERE)) == 0
