from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from airflow_delay_provider.brokers.ledger import delivery, fold, listing, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.tables import message_count, scheduled_message
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import floor_ms
from airflow_delay_provider.domain.exceptions import LifecycleError
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, messages


def test_counts_follow_each_change(ledger: Ledger):
    """B14, B20, B46, B49, B53, B66"""
    batch = messages(0, 1, 2)
    rows.insert(ledger, batch)
    assert rows.count(ledger) == {State.SCHEDULED: 3}
    for n in range(3):
        assert rows.deliver(ledger, now_ms=NOW_MS + n) == 1
        left = {State.SCHEDULED: 2 - n} if n < 2 else {}
        assert rows.count(ledger) == {**left, State.DISPATCHED: n + 1}


def test_messages_are_counted_by_channel(ledger: Ledger):
    """B14"""
    orders, refunds = messages(1, 2), messages(3, channel="refunds")
    rows.insert(ledger, orders)
    rows.insert(ledger, refunds, destination="rabbit")
    rows.change(ledger, Change.CANCELLED, orders[0])
    assert rows.count(ledger, channel="orders") == {State.SCHEDULED: 1, State.CANCELLED: 1}
    assert rows.count(ledger, channel="no-such") == {}
    by_channel = rows.read(ledger, listing.count_by_channel)
    assert list(by_channel) == ["orders", "refunds"]
    assert by_channel["refunds"] == {
        State.SCHEDULED: 1,
        State.DISPATCHED: 0,
        State.CANCELLED: 0,
        State.DEAD: 0,
    }


def test_the_destinations_that_messages_wait_for_are_known(ledger: Ledger):

    def waiting() -> list[str]:
        return rows.read(ledger, listing.waiting_destinations)

    rows.insert(ledger, messages(1))
    assert waiting() == []
    rabbit, kafka = messages(1, 1)
    rows.insert(ledger, [rabbit], destination="rabbit")
    rows.insert(ledger, [kafka], destination="kafka")
    assert waiting() == ["kafka", "rabbit"]
    rows.change(ledger, Change.CANCELLED, rabbit)
    assert waiting() == ["kafka"]


def test_a_failed_transaction_leaves_the_counts_alone(ledger: Ledger):
    """A29"""
    rows.insert(ledger, messages(1))

    def fail(connection):
        scheduling.insert(connection, messages(1, 2), on_conflict=OnConflict.KEEP, now_ms=NOW_MS)
        raise LifecycleError("x", "is refused")

    with pytest.raises(LifecycleError):
        ledger.transact(fail)
    assert rows.count(ledger) == {State.SCHEDULED: 1}


class Life:
    """Lets random things happen to messages, the way brokers, dispatchers and people make them happen."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = ledger
        self.clock = SettableClock()
        self.broker = EmbeddedBroker(ledger, clock=self.clock)
        self.known: list[Message] = []

    @property
    def now_ms(self) -> int:
        return floor_ms(self.clock.now())

    def step(self) -> None:
        happening: Callable[[], object] = self.random.choice(
            [
                self.schedule,
                self.schedule,
                self.schedule_again,
                self.send,
                self.cancel,
                self.move,
                self.consume,
                self.consume,
                self.deliver,
                self.dispatch_to_brokers,
                self.prune,
            ]
        )
        with suppress(LifecycleError):
            happening()
        self.clock.advance(timedelta(seconds=self.random.choice([0, 1, 10])))

    def new(self) -> list[Message]:
        batch = [
            Message(
                channel=self.random.choice(["a", "b"]),
                payload=b"",
                deliver_at=self.clock.now() + timedelta(seconds=self.random.randint(-5, 30)),
                key=self.random.choice([None, "k"]),
            )
            for _ in range(self.random.randint(1, 4))
        ]
        self.known += batch
        return batch

    def some(self) -> list[Message]:
        return self.random.sample(self.known, min(len(self.known), self.random.randint(0, 3)))

    def schedule(self) -> None:
        if self.random.random() < 0.7:
            self.broker.schedule(self.new())
        else:
            self.ledger.transact(
                lambda c: scheduling.insert(
                    c, self.new(), destination="rabbit", on_conflict=OnConflict.KEEP, now_ms=self.now_ms
                )
            )

    def schedule_again(self) -> None:
        again = [
            message.requeued(self.clock.now()) if self.random.random() < 0.3 else message for message in self.some()
        ]
        self.broker.schedule([*again, *self.new()], on_conflict=self.random.choice(list(OnConflict)))

    def send(self) -> None:
        self.broker.send([*self.some(), *self.new()])

    def cancel(self) -> None:
        self.broker.cancel([message.id for message in self.some()])

    def move(self) -> None:
        ids = [message.id for message in self.some()]
        if self.random.random() < 0.5:
            self.broker.expedite(ids)
        else:
            self.broker.reschedule(ids, self.clock.now() + timedelta(seconds=5))

    def consume(self) -> None:
        channel = self.random.choice(["a", "b", "a.dead", "b.dead"])
        for item in self.broker.receive(channel, limit=3, visibility=timedelta(seconds=5)):
            match self.random.choice(["ack", "requeue", "requeue now", "dead", "release", "nothing"]):
                case "ack":
                    self.broker.ack([item])
                case "requeue":
                    self.broker.requeue(item, timedelta(seconds=7))
                case "requeue now":
                    self.broker.requeue(item, timedelta(0))
                case "dead":
                    self.broker.dead_letter(item, channel=f"{item.message.channel}.dead", reason="bad")
                case "release":
                    self.broker.release([item])

    def deliver(self) -> None:
        self.ledger.transact(lambda c: delivery.deliver_due(c, now_ms=self.now_ms, limit=5))

    def dispatch_to_brokers(self) -> None:
        claims = self.ledger.transact(
            lambda c: delivery.claim_due(
                c, destination="rabbit", owner="o", now_ms=self.now_ms, until_ms=self.now_ms + 5000, limit=3
            )
        )
        sent, dead, back = claims[:1], claims[1:2], claims[2:]
        if self.random.random() < 0.8:
            self.ledger.transact(lambda c: delivery.mark_dispatched(c, sent, now_ms=self.now_ms))
            if dead:
                self.ledger.transact(lambda c: delivery.mark_dead(c, dead, now_ms=self.now_ms, reason="no"))
            self.ledger.transact(lambda c: delivery.give_back(c, back, owner="o", now_ms=NOW_MS))
        self.ledger.transact(lambda c: delivery.rescue_stale(c, now_ms=self.now_ms, limit=10))

    def prune(self) -> None:
        self.ledger.transact(fold.fold, self.random.choice([1, 10, 1000]))
        rows.prune(self.ledger, before_ms=self.now_ms - 60_000, limit=5)


def assert_counts_are_true(ledger: Ledger) -> Counter[int]:
    columns = scheduled_message.c
    place = (func.coalesce(columns.destination, ""), columns.channel, columns.state)
    with ledger.read() as connection:
        real = {tuple(row[:3]): row[3] for row in connection.execute(select(*place, func.count()).group_by(*place))}
        kept = {(row.destination, row.channel, row.state): row.n for row in connection.execute(select(message_count))}
    assert {key: n for key, n in kept.items() if n} == real
    return Counter({state: n for (_, _, state), n in real.items()})


@pytest.mark.parametrize("seed", range(6))
def test_counts_equal_the_rows_after_any_changes(sqlite_url: str, seed: int):
    """B14, B46, B66"""
    life = Life(Ledger(sqlite_url), seed)
    for _ in range(15):
        for _ in range(10):
            life.step()
        met = assert_counts_are_true(life.ledger)
    assert len(met) >= 3, "this life was too quiet to prove anything"
    life.ledger.close()


def test_counts_equal_the_rows_on_postgresql(postgres_url: str):
    """B14, B66"""
    life = Life(Ledger(postgres_url), seed=7)
    for _ in range(120):
        life.step()
    assert_counts_are_true(life.ledger)
    life.ledger.close()
