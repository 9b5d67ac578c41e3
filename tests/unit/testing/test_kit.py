from __future__ import annotations

import time
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.consumer import Consumed, ConsumerConfig
from airflow_delay_provider.brokers.ledger import scheduling
from airflow_delay_provider.domain.arguments import Limits, OnConflict
from airflow_delay_provider.domain.exceptions import ConflictError, DeferMessage, TooSoonError
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.kit import DelayTestKit

DAY = timedelta(days=1)


def test_thirty_days_pass_in_no_time(delay_kit: DelayTestKit):
    """A26, A38, E2"""
    delay_kit.schedule("reminders", {"invoice": 7}, deliver_after=30 * DAY)
    began = time.monotonic()
    assert delay_kit.advance(30 * DAY - timedelta(milliseconds=1)) == 0
    assert delay_kit.received("reminders") == []
    assert len(delay_kit.scheduled()) == 1
    assert delay_kit.advance(timedelta(milliseconds=1)) == 1
    assert [message.payload for message in delay_kit.received("reminders")] == [b'{"invoice":7}']
    assert delay_kit.scheduled() == []
    assert time.monotonic() - began < 60


def test_messages_are_dispatched_in_order_and_exactly_when_they_are_due(delay_kit: DelayTestKit):
    """B53, A38"""
    ids = [delay_kit.schedule("c", deliver_after=after * DAY) for after in (3, 1, 2, 9)]
    assert [message.id for message in delay_kit.scheduled()] == [ids[1], ids[2], ids[0], ids[3]]
    assert delay_kit.advance(5 * DAY) == 3
    assert [message.id for message in delay_kit.received("c")] == [ids[1], ids[2], ids[0]]
    assert {delay_kit.record(message_id).lateness for message_id in ids[:3]} == {timedelta(0)}
    assert delay_kit.record(ids[3]).state is State.SCHEDULED


def test_without_an_advance_only_due_messages_are_dispatched(delay_kit: DelayTestKit):
    delay_kit.schedule("c", deliver_after=1)
    assert delay_kit.dispatch() == 0
    delay_kit.clock.advance(timedelta(seconds=2))
    assert delay_kit.dispatch() == 1


def test_peeking_leaves_messages_and_consuming_takes_them(delay_kit: DelayTestKit):
    """A1, A23, A40"""
    delay_kit.schedule("c", "first")

    def handle(message: Message) -> None:
        if message.handled_count == 0:
            raise DeferMessage(60)

    assert len(delay_kit.received("c")) == len(delay_kit.received("c")) == 1
    assert delay_kit.consume("c", handle) == Consumed(deferred=1)
    assert delay_kit.received("c") == []
    delay_kit.advance(timedelta(minutes=1))
    assert delay_kit.consume("c", handle, config=ConsumerConfig(max_handled=3)) == Consumed(handled=1)


def test_the_rules_are_those_of_production():
    """A28, A31, B4"""
    with DelayTestKit(limits=Limits(min_delay=DAY)) as kit:
        with pytest.raises(TooSoonError):
            kit.schedule("c", deliver_after=1)
        kit.schedule("c", deliver_after=DAY, message_id="one")
        with pytest.raises(ConflictError):
            kit.schedule("c", deliver_after=DAY, message_id="one", on_conflict="fail")


def test_a_message_for_another_broker_is_left_to_that_ones_dispatcher(delay_kit: DelayTestKit):
    message = Message(channel="c", payload=b"", deliver_at=delay_kit.clock.now() + DAY)
    delay_kit.broker.ledger.transact(
        lambda c: scheduling.insert(c, [message], destination="rabbit", on_conflict=OnConflict.KEEP, now_ms=0)
    )
    assert delay_kit.advance(2 * DAY) == 0
    assert delay_kit.scheduled() == [message]


def test_two_kits_share_nothing():
    """A29, A41"""
    with DelayTestKit() as one, DelayTestKit() as other:
        one.schedule("c")
        one.advance(DAY)
        assert other.received("c") == []
        assert other.clock.now() != one.clock.now()
