"""What another broker holds is followed; that broker is a real one with a ledger of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete

from airflow_delay_provider.brokers.ledger import listing, projection
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.tables import journal_position
from airflow_delay_provider.brokers.port import Broker, LadderDispatcher, NeedsDispatcher
from airflow_delay_provider.dispatcher.dispatch_embedded import DispatchEmbedded
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.project_journal import MEASURED, PAGE, ProjectJournal
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.lifecycle import JournalEntry, State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock
from tools.servers.component import wait_for

SECOND = timedelta(seconds=1)


@pytest.fixture
def there(tmp_path: Path, clock: SettableClock) -> Iterator[EmbeddedBroker]:
    """The other broker."""
    with EmbeddedBroker(Ledger(f"sqlite:///{tmp_path / 'there.db'}"), clock=clock) as broker:
        yield broker


def dispatch(broker: EmbeddedBroker) -> None:
    """Dispatch due messages there."""
    loop = DispatchEmbedded(Context(ledger=broker.ledger, clock=broker.clock, config=DispatcherConfig()))
    while loop.run_once() == 0.0:
        pass


def schedule(broker: Broker, *delays: timedelta) -> list[Message]:
    messages = [Message(channel="c", payload=b"p", deliver_at=broker.clock.now() + delay) for delay in delays]
    broker.schedule(messages)
    return messages


def states(ledger: Ledger) -> dict[State, int]:
    with ledger.read() as connection:
        return {state: n for state, n in listing.count_by_state(connection).items() if n}


def lives(ledger: Ledger) -> dict[str, object]:
    """The record of each message, its history included."""
    with ledger.read() as connection:
        return {
            record.message.id: (
                record.state,
                record.message.deliver_at,
                record.message.handled_count,
                record.dispatched_at,
                [
                    (entry.change, entry.at, entry.deliver_at, entry.reason)
                    for entry in listing.get_history(connection, record.message.id)
                ],
            )
            for record in listing.page(connection, size=1000).records
        }


def loop_on(context: Context, *brokers: Broker) -> ProjectJournal:
    """A loop that opens these brokers, one after the other."""
    waiting = iter(brokers)
    return ProjectJournal(context, "there", lambda _: next(waiting))


def test_everything_that_happens_there_is_known_here(
    context: Context, there: EmbeddedBroker, clock: SettableClock
) -> None:
    """A45, B14, B41"""
    loop = loop_on(context, there)
    interval = context.config.index_interval.total_seconds()
    assert loop.run_once() == interval
    now, soon, late, gone = schedule(there, timedelta(0), SECOND, 600 * SECOND, 5 * SECOND)
    assert loop.run_once() == interval
    assert states(context.ledger) == {State.SCHEDULED: 3, State.DISPATCHED: 1}
    there.cancel([gone.id])
    there.reschedule([late.id], clock.now() + 900 * SECOND)
    clock.advance(2 * SECOND)
    dispatch(there)
    loop.run_once()
    assert states(context.ledger) == {State.SCHEDULED: 1, State.DISPATCHED: 2, State.CANCELLED: 1}
    assert lives(context.ledger) == lives(there.ledger)
    first, second = there.receive("c", limit=2)
    there.requeue(first, 5 * SECOND, reason="the service is down")
    there.dead_letter(second, channel="c.dead", reason="bad")
    clock.advance(6 * SECOND)
    dispatch(there)
    loop.run_once()
    [dead] = there.receive("c.dead")
    clock.advance(SECOND)
    there.requeue(dead, SECOND)
    loop.run_once()
    assert lives(context.ledger) == lives(there.ledger)
    with context.ledger.read() as connection:
        for message in (now, soon, late, gone):
            assert listing.get(connection, message.id).destination == "there"


class Measured:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.dispatched_by: list[tuple[dict[str, int], list[int]]] = []

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        self.dispatched_by.append((dict(by_channel), list(lateness_ms)))

    def failed(self, loop: str) -> None:
        raise AssertionError(loop)


def test_what_the_broker_dispatched_itself_is_measured_once(
    ledger: Ledger, there: EmbeddedBroker, clock: SettableClock
) -> None:
    """B39, B41: also if the journal is read again."""
    measured = Measured()
    context = Context(ledger=ledger, clock=clock, config=DispatcherConfig(), observers=[measured])
    schedule(there, SECOND, 2 * SECOND, 60 * SECOND)
    clock.advance(3 * SECOND)
    dispatch(there)
    loop_on(context, there).run_once()
    assert measured.dispatched_by == [({"c": 2}, [2000, 1000])]
    ledger.transact(lambda connection: connection.execute(delete(journal_position)))
    loop_on(context, there).run_once()
    assert len(measured.dispatched_by) == 1


def test_old_entries_of_a_journal_are_listed_and_not_measured(
    ledger: Ledger, there: EmbeddedBroker, clock: SettableClock
) -> None:
    measured = Measured()
    context = Context(ledger=ledger, clock=clock, config=DispatcherConfig(), observers=[measured])
    schedule(there, timedelta(0))
    clock.advance(MEASURED + SECOND)
    schedule(there, timedelta(0))
    loop_on(context, there).run_once()
    assert states(ledger) == {State.DISPATCHED: 2}
    assert measured.dispatched_by == [({"c": 1}, [0])]


def test_a_ladder_that_a_dispatcher_serves_is_measured_by_that_dispatcher(
    ledger: Ledger, there: EmbeddedBroker, clock: SettableClock
) -> None:
    class Ladder(EmbeddedBroker, NeedsDispatcher):
        def open_ladder_dispatcher(self, **_: object) -> LadderDispatcher:
            raise NotImplementedError

    measured = Measured()
    context = Context(ledger=ledger, clock=clock, config=DispatcherConfig(), observers=[measured])
    schedule(there, timedelta(0))
    loop_on(context, Ladder(there.ledger, clock=clock)).run_once()
    assert states(ledger) == {State.DISPATCHED: 1}
    assert measured.dispatched_by == []


def test_a_long_journal_is_followed_page_by_page_and_by_the_next_dispatcher(
    context: Context, there: EmbeddedBroker
) -> None:
    """B60: from where the one before stopped."""
    schedule(there, *[SECOND] * (PAGE + 1))
    assert loop_on(context, there).run_once() == 0.0
    assert states(context.ledger) == {State.SCHEDULED: PAGE}
    assert loop_on(context, there).run_once() > 0
    assert states(context.ledger) == {State.SCHEDULED: PAGE + 1}
    before = lives(context.ledger)
    assert loop_on(context, there).run_once() > 0
    assert lives(context.ledger) == before


def test_of_two_dispatchers_that_read_the_same_page_one_writes_it(context: Context, there: EmbeddedBroker) -> None:
    """B32"""
    quick = loop_on(context, there)

    class Overtaken(EmbeddedBroker):
        def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:
            entries = super().read_journal(after=after, limit=limit)
            quick.run_once()
            return entries

    schedule(there, SECOND, SECOND)
    slow = loop_on(context, Overtaken(there.ledger, clock=there.clock))
    assert slow.run_once() == context.config.index_interval.total_seconds()
    assert states(context.ledger) == {State.SCHEDULED: 2}
    assert lives(context.ledger) == lives(there.ledger)


class Broken(EmbeddedBroker):
    """Fails to read, and remembers whether it was closed."""

    closed = False

    def read_journal(self, *, after: str, limit: int = 1000) -> list[JournalEntry]:  # noqa: ARG002 - the port's signature
        raise BrokerError("gone")

    def close(self) -> None:
        self.closed = True
        raise BrokerError("gone already")


def test_a_broker_that_failed_is_closed_and_opened_again(context: Context, there: EmbeddedBroker) -> None:
    """B36"""
    broken = Broken(there.ledger)
    loop = loop_on(context, broken, there)
    schedule(there, SECOND)
    with pytest.raises(BrokerError, match="gone"):
        loop.run_once()
    assert broken.closed
    loop.run_once()
    assert states(context.ledger) == {State.SCHEDULED: 1}


def test_a_ledger_that_failed_is_read_on_from_the_same_place(
    context: Context, there: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B61: nothing of a page is kept unless all of it is."""
    schedule(there, SECOND)
    loop = loop_on(context, there)
    with monkeypatch.context() as patch:
        patch.setattr(projection, "_count", lambda *_: 1 / 0)
        with suppress(ZeroDivisionError):
            loop.run_once()
    assert states(context.ledger) == {}
    loop.run_once()
    assert lives(context.ledger) == lives(there.ledger)


def test_a_dispatcher_follows_the_given_connections_and_one_that_is_down_blocks_no_other(
    sqlite_url: str, tmp_path: Path
) -> None:
    """A44, B36"""
    opened: list[EmbeddedBroker] = []

    def open_broker(conn_id: str) -> Broker:
        if conn_id == "down":
            raise BrokerError("cannot be reached")
        opened.append(EmbeddedBroker(Ledger(f"sqlite:///{tmp_path / 'there.db'}")))
        return opened[-1]

    config = DispatcherConfig(
        index=("down", "there", "there"),
        index_interval=timedelta(milliseconds=20),
        backoff=Backoff(initial=timedelta(milliseconds=10), cap=timedelta(milliseconds=20), floor=timedelta(0)),
        health_port=None,
    )
    with (
        EmbeddedBroker(Ledger(f"sqlite:///{tmp_path / 'there.db'}")) as there,
        EmbeddedBroker(Ledger(sqlite_url)) as here,
    ):
        dispatcher = Dispatcher(Ledger(sqlite_url), open_broker=open_broker, config=config)
        dispatcher.start()
        try:
            schedule(there, timedelta(0), timedelta(hours=1))
            schedule(here, timedelta(milliseconds=50))
            wait_for(
                lambda: states(here.ledger) == {State.SCHEDULED: 1, State.DISPATCHED: 2},
                what="all is dispatched and followed",
                seconds=60,
                interval=0.02,
            )
            wait_for(
                lambda: dispatcher.health()["loops"]["project_journal:down"]["error"],
                what="what is down is noticed",
                seconds=60,
                interval=0.02,
            )
            health = dispatcher.health()["loops"]
        finally:
            assert dispatcher.stop()
    assert 1 <= len(opened) <= 2, "one to read its journal, one to check it"
    assert health["project_journal:there"]["well"]
    assert "cannot be reached" in health["project_journal:down"]["error"]
