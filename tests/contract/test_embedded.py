from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Connection, event

from airflow_delay_provider.brokers.consumer import Bound
from airflow_delay_provider.brokers.ledger import scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Broker, Outcome
from airflow_delay_provider.domain.arguments import Limits, OnConflict
from airflow_delay_provider.domain.exceptions import LedgerError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.kit import DelayTestKit
from tests.contract.broker_contract import BrokerContract
from tests.contract.harness import BrokerHarness
from tests.contract.journal import Tail


class EmbeddedHarness(BrokerHarness):
    """The embedded broker on a clock that is set, so no test waits."""

    #: The journal of PostgreSQL waits for all transactions on the server, also for those of other tests.
    patience = timedelta(seconds=60)

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.kit = DelayTestKit()
        self.kit.broker = EmbeddedBroker(ledger, clock=self.kit.clock)
        super().__init__()

    def make_broker(self, limits: Limits | None) -> Broker:
        return EmbeddedBroker(self.ledger, limits=limits, clock=self.kit.clock)

    def pass_time(self, delta: timedelta) -> None:
        self.kit.advance(delta)

    def dispatch(self) -> None:
        self.kit.dispatch()


@pytest.fixture
def harness(shared_ledger: Ledger) -> Iterator[EmbeddedHarness]:
    harness = EmbeddedHarness(shared_ledger)
    yield harness
    harness.close()


class TestEmbeddedBroker(BrokerContract):
    """The port, on SQLite and on PostgreSQL."""


# -- needs a settable clock, or a database that can be blocked -----------------------------------------------------

MILLISECOND = timedelta(milliseconds=1)


def test_a_message_arrives_in_the_millisecond_it_is_due(harness: EmbeddedHarness):
    """B60, C9"""
    channel = harness.channel()
    message = harness.message(channel, after=3600)
    harness.broker.schedule([message])
    harness.pass_time(harness.units(3600) - MILLISECOND)
    assert harness.broker.peek(channel) == []
    harness.pass_time(MILLISECOND)
    assert harness.broker.peek(channel) == [message]


def test_between_two_milliseconds_a_message_waits_for_the_later_one(harness: EmbeddedHarness):
    """C9"""
    channel = harness.channel()
    due = harness.kit.clock.now() + timedelta(microseconds=1_500)
    harness.broker.schedule([Message(channel=channel, payload=b"", deliver_at=due)])
    harness.pass_time(timedelta(microseconds=1_999))
    assert harness.broker.peek(channel) == []
    harness.pass_time(timedelta(microseconds=1))
    assert len(harness.broker.peek(channel)) == 1


@pytest.mark.parametrize("delay", [0, -0.0001])
def test_due_at_once_holds_between_two_milliseconds(harness: EmbeddedHarness, delay: float):
    """A10"""
    channel = harness.channel()
    harness.kit.clock.advance(timedelta(microseconds=300))
    harness.kit.schedule(channel, deliver_after=delay)
    assert len(harness.broker.peek(channel)) == 1


def test_while_the_dispatcher_lags_no_message_overtakes_an_earlier_one_of_its_key(harness: EmbeddedHarness):
    """B53, A46"""
    channel = harness.channel()
    handled = harness.message(channel, after=0, key="k")
    harness.broker.schedule([handled])
    [delivery] = harness.receive(channel, 1)
    messages = [harness.message(channel, after=after, key="k") for after in (1, 2, 600)]
    harness.broker.schedule(messages)
    harness.kit.clock.advance(harness.units(3))
    at_once = harness.message(channel, after=0, key="k")
    [receipt] = harness.broker.schedule([at_once])
    assert receipt.outcome is Outcome.SCHEDULED
    harness.broker.requeue(delivery, timedelta(0))
    assert harness.broker.peek(channel) == []
    harness.dispatch()
    arrived = [message.id for message in harness.broker.peek(channel, limit=10)]
    assert arrived[:2] == [messages[0].id, messages[1].id]
    assert set(arrived[2:]) == {at_once.id, handled.id}


@pytest.mark.parametrize("key", [None, "other"])
def test_while_the_dispatcher_lags_messages_of_other_keys_go_straight_on(harness: EmbeddedHarness, key: str | None):
    """A10, C14"""
    channel = harness.channel()
    harness.broker.schedule([harness.message(channel, after=1, key="k"), harness.message(channel, after=1)])
    harness.kit.clock.advance(harness.units(2))
    batch = [harness.message(channel, after=after, key=key) for after in (-1, 0)]
    assert {receipt.outcome for receipt in harness.broker.schedule(batch)} == {Outcome.DISPATCHED}


@pytest.fixture
def slow_writer(harness: EmbeddedHarness) -> Iterator[Connection]:
    """A transaction that can be held open."""
    with harness.ledger.engine.connect() as connection:
        yield connection


#: SQLite has one writer at a time, and so none that is overtaken.
only_where_writers_overlap = pytest.mark.parametrize("shared_ledger", ["postgresql"], indirect=True)


@only_where_writers_overlap
def test_entries_of_a_transaction_that_commits_late_are_not_passed_by(
    harness: EmbeddedHarness, slow_writer: Connection
):
    """D11: later transactions commit first, so a reader that only remembers a number would miss the earlier ones."""
    early_reader = Tail(harness.broker)
    slow, quick, last = messages = [harness.message(harness.channel(), after=600) for _ in range(3)]
    scheduling.insert(slow_writer, [slow], on_conflict=OnConflict.KEEP, now_ms=0)
    harness.broker.schedule([quick])
    late_reader = Tail(harness.broker)
    for reader in (early_reader, late_reader):
        reader.read()
    slow_writer.commit()
    harness.broker.schedule([last])
    for reader in (early_reader, late_reader):
        found = reader.wait_for(harness, messages, 3)
        assert [entry.message_id for entry in found] == [slow.id, quick.id, last.id]


@only_where_writers_overlap
def test_a_rolled_back_transaction_holds_no_reader_up(harness: EmbeddedHarness, slow_writer: Connection):
    """D11"""
    reader = Tail(harness.broker)
    gone, stays = (harness.message(harness.channel(), after=600) for _ in range(2))
    scheduling.insert(slow_writer, [gone], on_conflict=OnConflict.KEEP, now_ms=0)
    harness.broker.schedule([stays])
    slow_writer.rollback()
    assert [entry.message_id for entry in reader.wait_for(harness, [gone, stays], 1)] == [stays.id]


def test_an_unreachable_database_names_the_messages_that_are_not_confirmed():
    """A12"""
    broker = EmbeddedBroker(Ledger("postgresql://delay:secret@127.0.0.1:1/nowhere"))
    message = Message(channel="c", payload=b"", deliver_at=broker.clock.now())
    with pytest.raises(LedgerError) as failed:
        broker.schedule([message])
    assert failed.value.unconfirmed == (message.id,)
    assert "secret" not in str(failed.value)


def test_one_statement_shows_the_heads_of_all_channels(harness: EmbeddedHarness):
    """Triggerers ask twice a second, however many channels their sensors wait on."""
    channels = [harness.channel() for _ in range(5)]
    for channel in channels:
        harness.broker.send([harness.message(channel, after=0) for _ in range(3)])
    consumer = harness.broker.open_shared_consumer(on_change=lambda: None)
    bounds = {channel: Bound(messages=2) for channel in channels}
    first = consumer.look(bounds)
    statements: list[str] = []

    @event.listens_for(harness.ledger.engine, "before_cursor_execute")
    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    try:
        assert consumer.look(bounds) == first
    finally:
        event.remove(harness.ledger.engine, "before_cursor_execute", note)
    assert [len(messages) for messages in first.values()] == [2] * 5
    assert len([statement for statement in statements if statement.lstrip().startswith("SELECT")]) == 1
