"""A dispatcher delivers the delayed messages of a broker; that broker stands for Kafka, which has its own tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Broker, LadderDispatcher, NeedsDispatcher, OnDispatched
from airflow_delay_provider.dispatcher.dispatch_kafka import DispatchKafka
from airflow_delay_provider.dispatcher.loop import Context, TokenBucket
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError
from tools.servers.component import wait_for

#: What one run dispatches: how late each message was.
LATE_MS = [3, 4]


class LadderBroker(EmbeddedBroker, NeedsDispatcher):
    """Opens one ladder dispatcher and records what became of both, and in which threads."""

    def __init__(self, ledger: Ledger, *, failure: Exception | None = None, close_failure: Exception | None = None):
        super().__init__(ledger)
        self.failure = failure
        self.close_failure = close_failure
        self.instance: str | None = None
        self.closed: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.runs = 0

    def open_ladder_dispatcher(
        self, *, instance: str | None = None, on_dispatched: OnDispatched | None = None
    ) -> LadderDispatcher:
        self.instance = instance
        assert on_dispatched is not None
        return StubLadderDispatcher(self, on_dispatched)

    def note_closed(self, what: str) -> None:
        self.threads.add(threading.current_thread())
        self.closed.append(what)
        if self.close_failure is not None:
            raise self.close_failure

    def close(self) -> None:
        self.note_closed("broker")


class StubLadderDispatcher(LadderDispatcher):
    def __init__(self, broker: LadderBroker, on_dispatched: OnDispatched) -> None:
        self._broker = broker
        self._on_dispatched = on_dispatched

    def run_once(self) -> float:
        self._broker.threads.add(threading.current_thread())
        self._broker.runs += 1
        if self._broker.failure is not None:
            raise self._broker.failure
        self._on_dispatched({"orders": len(LATE_MS)}, LATE_MS)
        return 0.25

    def close(self) -> None:
        self._broker.note_closed("ladder dispatcher")


class Noted:
    """An observer that keeps its notifications."""

    def __init__(self) -> None:
        self.dispatches: list[tuple[dict[str, int], list[int]]] = []

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        self.dispatches.append((dict(by_channel), list(lateness_ms)))

    def failed(self, loop: str) -> None:
        raise AssertionError(loop)


@pytest.fixture
def here(sqlite_url: str) -> Iterator[Ledger]:
    opened = Ledger(sqlite_url)
    yield opened
    opened.close()


def loop_on(
    ledger: Ledger, *brokers: Broker, observer: Noted | None = None, rate: float | None = None
) -> DispatchKafka:
    """A loop that opens these brokers, one after the other."""
    waiting = iter(brokers)
    return DispatchKafka(context_on(ledger, observer, rate), "there", lambda _: next(waiting))


def context_on(ledger: Ledger, observer: Noted | None = None, rate: float | None = None) -> Context:
    return Context(
        ledger=ledger,
        clock=SystemClock(),
        config=DispatcherConfig(instance="me"),
        observers=[observer] if observer else [],
        bucket=None if rate is None else TokenBucket(rate, now=lambda: 0.0),
    )


def test_the_ladder_dispatcher_is_opened_once_and_reports_what_it_dispatched(here: Ledger) -> None:
    """A6, B65"""
    broker, noted = LadderBroker(here), Noted()
    loop = loop_on(here, broker, observer=noted)
    assert loop.name == "dispatch_kafka:there"
    assert [loop.run_once(), loop.run_once()] == [0.25, 0.25]
    assert (broker.runs, broker.instance, broker.closed) == (2, "me", [])
    assert noted.dispatches == [({"orders": 2}, LATE_MS)] * 2


def test_after_an_outage_the_ladder_dispatcher_keeps_what_it_has_learned(here: Ledger) -> None:
    """B34, B36"""
    broker = LadderBroker(here, failure=BrokerError("gone"))
    loop = loop_on(here, broker)
    with pytest.raises(BrokerError, match="gone"):
        loop.run_once()
    broker.failure = None
    loop.run_once()
    assert (broker.runs, broker.closed) == (2, [])


@pytest.mark.parametrize("error", [BrokerError("denied", may_pass=False), RuntimeError("a defect")], ids=str)
def test_after_any_other_error_both_clients_are_closed_and_opened_again(here: Ledger, error: Exception) -> None:
    """B36: a password may have been changed."""
    broken, good = LadderBroker(here, failure=error), LadderBroker(here)
    loop = loop_on(here, broken, good)
    with pytest.raises(type(error), match=str(error)):
        loop.run_once()
    assert broken.closed == ["ladder dispatcher", "broker"]
    loop.run_once()
    assert (good.runs, good.closed) == (1, [])


@pytest.mark.parametrize("failure", [BrokerError("gone already"), RuntimeError("a defect")], ids=str)
def test_clients_that_do_not_close_hide_no_error_and_keep_nothing_open(here: Ledger, failure: Exception) -> None:
    """B36"""
    broken = LadderBroker(here, failure=BrokerError("gone", may_pass=False), close_failure=failure)
    loop = loop_on(here, broken, LadderBroker(here))
    with pytest.raises(BrokerError, match=r"gone$"):
        loop.run_once()
    assert broken.closed == ["ladder dispatcher", "broker"]
    assert loop.run_once() == 0.25


def test_a_broker_with_a_clock_of_its_own_is_refused_and_closed(here: Ledger) -> None:
    class Clocked(EmbeddedBroker):
        closed = False

        def close(self) -> None:
            self.closed = True

    broker = Clocked(here)
    with pytest.raises(
        ConfigurationError,
        match=r"kafka: .*'there' is not a Kafka connection.*; use a connection of type",
    ):
        loop_on(here, broker).run_once()
    assert broker.closed


def test_closing_ends_the_ladder_dispatcher_before_its_broker_and_only_once(here: Ledger) -> None:
    broker = LadderBroker(here)
    loop = loop_on(here, broker)
    loop.close()
    loop.run_once()
    loop.close()
    loop.close()
    assert broker.closed == ["ladder dispatcher", "broker"]


def test_kafka_takes_nothing_from_the_rate_limit_of_the_ledger(here: Ledger) -> None:
    """B29"""
    context = context_on(here, rate=10)
    kafka = DispatchKafka(context, "there", lambda _: LadderBroker(here))
    for _ in range(100):
        kafka.run_once()
    assert context.bucket is not None
    assert context.bucket.available() == 1


def test_a_dispatcher_serves_the_given_connections_and_closes_each_in_its_thread(here: Ledger, sqlite_url: str) -> None:
    """A44, B36"""
    opened: list[LadderBroker] = []

    def open_broker(conn_id: str) -> Broker:
        if conn_id == "down":
            raise BrokerError("cannot be reached")
        opened.append(LadderBroker(here))
        return opened[-1]

    config = DispatcherConfig(
        kafka=("down", "there", "there"),
        instance="first",
        backoff=Backoff(initial=timedelta(milliseconds=10), cap=timedelta(milliseconds=20), floor=timedelta(0)),
        health_port=None,
    )
    dispatcher = Dispatcher(Ledger(sqlite_url), open_broker=open_broker, config=config)
    dispatcher.start()
    try:
        wait_for(
            lambda: any(each.runs > 1 for each in opened),
            what="a run",
            seconds=60,
            interval=0.02,
        )
        wait_for(
            lambda: dispatcher.health()["loops"]["dispatch_kafka:down"]["error"],
            what="what is down is noticed",
            seconds=60,
            interval=0.02,
        )
        health = dispatcher.health()["loops"]
        metrics = dispatcher.metrics().decode()
    finally:
        assert dispatcher.stop()
    # The other one is checked only.
    [broker] = [each for each in opened if each.runs]
    assert broker.instance == "first"
    assert broker.closed == ["ladder dispatcher", "broker"]
    assert [thread.name for thread in broker.threads] == ["delay-dispatch_kafka:there"]
    assert health["dispatch_kafka:there"]["well"]
    assert "cannot be reached" in health["dispatch_kafka:down"]["error"]
    assert 'delay_dispatched_total{channel="orders"}' in metrics
