from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, select
from sqlalchemy.engine import make_url

from airflow_delay_provider.brokers.ledger import delivery, listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.delivery import Claim
from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, messages

MINUTE_MS = 60_000


def claim(
    ledger: Ledger, *, owner: str = "one", limit: int = 100, now_ms: int = NOW_MS, destination: str = "rabbit"
) -> list[Claim]:
    return ledger.transact(
        lambda c: delivery.claim_due(
            c, destination=destination, owner=owner, now_ms=now_ms, until_ms=now_ms + MINUTE_MS, limit=limit
        )
    )


def claimed(claims: list[Claim]) -> list[str]:
    return [item.message.id for item in claims]


def stored(ledger: Ledger, *due: int, destination: str = "rabbit", **options: object) -> list[Message]:
    batch = messages(*due, **options)
    rows.insert(ledger, batch, destination=destination)
    return batch


def test_a_claim_takes_due_messages_of_its_destination_oldest_first(ledger: Ledger):
    """B20, B27"""
    later, sooner, _waits = stored(ledger, -1, -2, 1)
    stored(ledger, -5, destination="kafka")
    rows.insert(ledger, messages(-5))
    claims = claim(ledger)
    assert [item.message for item in claims] == [sooner, later]


def test_no_other_dispatcher_gets_a_claimed_message(ledger: Ledger):
    """B32, B37"""
    first, second, third = stored(ledger, -3, -2, -1)
    assert claimed(claim(ledger, owner="one", limit=2)) == [first.id, second.id]
    assert claimed(claim(ledger, owner="two")) == [third.id]
    assert claim(ledger, owner="three") == []


def test_many_dispatchers_never_claim_a_message_twice(ledger: Ledger):
    """B28, B32, B37"""
    batch = stored(ledger, *range(-200, 0))

    def work(owner: str) -> list[str]:
        mine: list[str] = []
        while claims := claim(ledger, owner=owner, limit=9):
            mine += claimed(claims)
        return mine

    with ThreadPoolExecutor(4) as pool:
        taken = [id for part in pool.map(work, ["a", "b", "c", "d"]) for id in part]
    assert sorted(taken) == sorted(message.id for message in batch)


def test_a_message_waits_while_an_earlier_one_of_its_key_is_being_sent(ledger: Ledger):
    """B53, B62"""
    first, second = stored(ledger, -3, -2, key="k")
    other_key, no_key = stored(ledger, -1, key="other") + stored(ledger, -1)
    other_channel = stored(ledger, -1, key="k", channel="refunds")[0]
    taken = claim(ledger, owner="one", limit=1)
    assert claimed(taken) == [first.id]
    assert set(claimed(claim(ledger, owner="two"))) == {other_key.id, no_key.id, other_channel.id}
    ledger.transact(lambda c: delivery.mark_dispatched(c, taken, now_ms=NOW_MS))
    assert claimed(claim(ledger, owner="two")) == [second.id]


def test_messages_of_one_key_are_claimed_together_in_order(ledger: Ledger):
    """B53"""
    third, first, second = stored(ledger, -1, -3, -2, key="k")
    assert claimed(claim(ledger)) == [first.id, second.id, third.id]


def test_a_confirmed_message_is_marked_and_its_claim_ends(ledger: Ledger):
    """B20, B30"""
    [sent] = stored(ledger, -5)
    claims = claim(ledger)
    assert ledger.transact(lambda c: delivery.mark_dispatched(c, claims, now_ms=NOW_MS + 2)) == 1
    record = rows.get(ledger, sent)
    assert (record.state, record.dispatched_at) == (State.DISPATCHED, from_ms(NOW_MS + 2))
    assert rows.count(ledger) == {State.DISPATCHED: 1}
    history = rows.read(ledger, lambda c: listing.get_history(c, sent.id))
    assert [entry.change for entry in history] == [Change.SCHEDULED, Change.DISPATCHED]


def test_marking_twice_counts_once(ledger: Ledger):
    """B33, B61: after a crash between publish and mark two dispatchers may mark the same message."""
    stored(ledger, -5)
    claims = claim(ledger)
    assert ledger.transact(lambda c: delivery.mark_dispatched(c, claims, now_ms=NOW_MS)) == 1
    assert ledger.transact(lambda c: delivery.mark_dispatched(c, claims, now_ms=NOW_MS)) == 0
    assert rows.count(ledger) == {State.DISPATCHED: 1}


def test_a_message_that_the_broker_refuses_for_good_is_dead_with_the_reason(ledger: Ledger):
    """A25"""
    [refused] = stored(ledger, -5)
    claims = claim(ledger)
    ledger.transact(lambda c: delivery.mark_dead(c, claims, now_ms=NOW_MS, reason="too large"))
    assert rows.state(ledger, refused) is State.DEAD
    assert rows.count(ledger) == {State.DEAD: 1}
    history = rows.read(ledger, lambda c: listing.get_history(c, refused.id))
    assert (history[-1].change, history[-1].reason) == (Change.DEAD_LETTERED, "too large")


def test_messages_that_were_not_sent_are_released_and_claimed_again(ledger: Ledger):
    """B34, B36"""
    first, second = stored(ledger, -2, -1)
    claims = claim(ledger, owner="one")
    ledger.transact(lambda c: delivery.give_back(c, claims[1:], owner="one", now_ms=NOW_MS))
    assert claimed(claim(ledger, owner="two")) == [second.id]
    assert rows.state(ledger, first) is State.SCHEDULED


def test_a_dispatcher_never_releases_the_later_claim_of_another(ledger: Ledger):
    """B32"""
    stored(ledger, -1)
    lost = claim(ledger, owner="one")
    rescue(ledger, NOW_MS + 2 * MINUTE_MS)
    claim(ledger, owner="two", now_ms=NOW_MS + 2 * MINUTE_MS)
    ledger.transact(lambda c: delivery.give_back(c, lost, owner="one", now_ms=NOW_MS))
    assert claim(ledger, owner="three", now_ms=NOW_MS + 2 * MINUTE_MS) == []


def rescue(ledger: Ledger, now_ms: int, *, limit: int = 100) -> int:
    return ledger.transact(lambda c: delivery.rescue_stale(c, now_ms=now_ms, limit=limit))


def test_claims_of_a_dead_dispatcher_are_rescued_after_their_time(ledger: Ledger):
    """A44, B37, B61, D12"""
    batch = stored(ledger, -3, -2, -1)
    claim(ledger, owner="dead")
    assert rescue(ledger, NOW_MS + MINUTE_MS) == 0
    assert rescue(ledger, NOW_MS + MINUTE_MS + 1, limit=2) == 2
    assert rescue(ledger, NOW_MS + MINUTE_MS + 1) == 1
    assert claimed(claim(ledger, owner="alive")) == [message.id for message in batch]


def test_a_rescued_message_can_be_cancelled(ledger: Ledger):
    [message] = stored(ledger, -1)
    claim(ledger, owner="dead")
    rescue(ledger, NOW_MS + 2 * MINUTE_MS)
    rows.change(ledger, Change.CANCELLED, message)
    assert claim(ledger) == []


def test_without_claims_nothing_is_released_or_marked(ledger: Ledger):
    ledger.transact(lambda c: delivery.give_back(c, [], owner="one", now_ms=NOW_MS))
    assert ledger.transact(lambda c: delivery.mark_dispatched(c, [], now_ms=NOW_MS)) == 0


def impatient_ledger(postgres_url: str) -> Ledger:
    """Return a ledger in which a statement that waits for another transaction fails."""
    return Ledger(make_url(postgres_url).update_query_dict({"options": "-c lock_timeout=300ms"}))


@contextmanager
def claiming(postgres_url: str) -> Iterator[tuple[Ledger, list[str], Connection]]:
    """Yield a ledger, what another dispatcher has claimed of it, and the transaction in which it does so."""
    ledger = impatient_ledger(postgres_url)
    stored(ledger, -3, -2, -1)
    with ledger.engine.connect() as connection:
        first = delivery.claim_due(
            connection, destination="rabbit", owner="slow", now_ms=NOW_MS, until_ms=NOW_MS + MINUTE_MS, limit=1
        )
        yield ledger, claimed(first), connection
    ledger.close()


def test_a_dispatcher_does_not_wait_until_another_one_has_committed_its_claim(postgres_url: str):
    """B32"""
    with claiming(postgres_url) as (ledger, first, connection):
        others = claimed(claim(ledger, owner="quick"))
        assert len(others) == 2
        assert set(first).isdisjoint(others)
        connection.commit()


def test_what_a_dispatcher_claimed_and_did_not_commit_is_claimed_by_others(postgres_url: str):
    """B37"""
    with claiming(postgres_url) as (ledger, first, connection):
        connection.rollback()
        assert claimed(claim(ledger, owner="quick"))[0] == first[0]


@pytest.mark.parametrize("channels", [None, ["orders", "refunds"]])
def test_a_message_does_not_overtake_one_of_its_key_that_is_being_claimed(
    postgres_url: str, channels: list[str] | None
):
    """B53, B62: the claim is not committed, so it is still invisible."""
    ledger = impatient_ledger(postgres_url)
    first, _second = stored(ledger, -3, -2, key="k")
    other_key, elsewhere = stored(ledger, -1, key="other")[0], stored(ledger, -1, key="k", channel="refunds")[0]
    options = {"destination": "rabbit", "channels": channels, "now_ms": NOW_MS, "until_ms": NOW_MS + MINUTE_MS}
    with ledger.engine.connect() as connection:
        assert claimed(delivery.claim_due(connection, owner="one", limit=1, **options)) == [first.id]
        taken = ledger.transact(delivery.claim_due, owner="two", limit=100, **options)
        assert set(claimed(taken)) == {other_key.id, elsewhere.id}
        connection.commit()
    assert claim(ledger, owner="two") == []
    ledger.close()


def test_a_message_does_not_overtake_one_of_its_key_that_enters_its_embedded_channel(postgres_url: str):
    """B53, B62"""
    ledger = impatient_ledger(postgres_url)
    rows.insert(ledger, messages(-4, -3, key="k"))
    rows.insert(ledger, messages(-2, key="k", channel="refunds"))
    with ledger.engine.connect() as connection:
        assert len(delivery.deliver_due(connection, now_ms=NOW_MS, limit=1)) == 1
        assert rows.deliver(ledger) == 1
        connection.commit()
    assert rows.count(ledger, channel="refunds") == {State.DISPATCHED: 1}
    assert rows.deliver(ledger) == 1
    ledger.close()


def test_a_message_that_another_transaction_locks_does_not_hold_up_the_others(postgres_url: str):
    """B32: a user who is cancelling one message does not stop the dispatcher."""
    ledger = Ledger(postgres_url)
    locked, other = stored(ledger, -3, -2)
    with ledger.engine.connect() as connection:
        rows_of_one = select(scheduled_message.c.seq).where(scheduled_message.c.id == locked.id)
        assert connection.execute(rows_of_one.with_for_update()).scalar() is not None
        assert claimed(claim(ledger)) == [other.id]
        connection.rollback()
    ledger.close()


def test_no_more_payload_is_claimed_than_fits_into_memory(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    """B26: however many messages may be claimed at once."""
    monkeypatch.setattr(delivery, "MOST_CLAIMED_BYTES", 250)
    sizes = [100, 100, 100, 1, 400, 10]
    batch = [rows.message(NOW_MS - 10 + n, payload=b"x" * size) for n, size in enumerate(sizes)]
    rows.insert(ledger, batch, destination="rabbit")
    found = [[len(item.message.payload) for item in claim(ledger)] for _ in range(5)]
    assert found == [[100, 100], [100, 1], [400], [10], []]
    channels = {"destination": "rabbit", "channels": ["orders", "refunds"], "owner": "one", "limit": 9}
    rows.insert(ledger, [rows.message(NOW_MS, payload=b"x" * 200)], destination="rabbit")
    rows.insert(ledger, [rows.message(NOW_MS, payload=b"x" * 200, channel="refunds")], destination="rabbit")
    both = [ledger.transact(delivery.claim_due, now_ms=NOW_MS, until_ms=NOW_MS + 1, **channels) for _ in range(2)]
    assert [[item.message.channel for item in claims] for claims in both] == [["orders"], ["refunds"]]
