"""The loops one by one, on real ledgers, with a clock that is set by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.ledger import delivery, listing, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Receipt
from airflow_delay_provider.dispatcher.dispatch_embedded import DispatchEmbedded
from airflow_delay_provider.dispatcher.dispatch_to_brokers import DispatchToBrokers
from airflow_delay_provider.dispatcher.housekeeping import Prune, RescueStale
from airflow_delay_provider.dispatcher.loop import Context, TokenBucket
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.domain.arguments import Limits, OnConflict
from airflow_delay_provider.domain.clock import floor_ms
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, PayloadError, UnknownChannelError
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock
from tests.unit.brokers.ledger import rows

SECOND = timedelta(seconds=1)


class Noted:
    """An observer that keeps its notifications."""

    def __init__(self) -> None:
        self.lateness_ms: list[int] = []
        self.by_channel: dict[str, int] = {}

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        self.lateness_ms.extend(lateness_ms)
        self.by_channel.update(by_channel)

    def failed(self, loop: str) -> None:
        raise AssertionError(loop)


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def context(ledger: Ledger, clock: SettableClock, noted: Noted) -> Context:
    return Context(ledger=ledger, clock=clock, config=DispatcherConfig(batch=10), observers=[noted])


def schedule(context: Context, *delays: timedelta, channel: str = "c") -> list[str]:
    broker = EmbeddedBroker(context.ledger, clock=context.clock)
    messages = [Message(channel=channel, payload=b"", deliver_at=context.clock.now() + delay) for delay in delays]
    return [receipt.message_id for receipt in broker.schedule(messages)]


def schedule_elsewhere(context: Context, *messages: Message) -> None:
    now_ms = floor_ms(context.clock.now())
    context.ledger.transact(
        lambda connection: scheduling.insert(
            connection, messages, destination="there", on_conflict=OnConflict.FAIL, now_ms=now_ms
        )
    )


def states(context: Context) -> dict[State, int]:
    with context.ledger.read() as connection:
        return {state: n for state, n in listing.count_by_state(connection).items() if n}


def test_nothing_is_dispatched_a_millisecond_before_it_is_due(context: Context, clock: SettableClock) -> None:
    """B27, C9, E12"""
    schedule(context, SECOND)
    clock.advance(SECOND - timedelta(milliseconds=1))
    assert DispatchEmbedded(context).run_once() > 0
    assert states(context) == {State.SCHEDULED: 1}
    clock.advance(timedelta(milliseconds=1))
    DispatchEmbedded(context).run_once()
    assert states(context) == {State.DISPATCHED: 1}


def test_the_loop_sleeps_until_the_next_message_but_looks_again_soon(context: Context) -> None:
    """B24, B29, D8"""
    loop = DispatchEmbedded(context)
    poll = context.config.poll_interval.total_seconds()
    assert loop.run_once() == poll
    schedule(context, timedelta(milliseconds=7))
    assert loop.run_once() == pytest.approx(0.007)
    schedule(context, timedelta(hours=1))
    assert loop.run_once() == pytest.approx(0.007)


def test_a_backlog_is_taken_in_bounded_batches_oldest_first_without_a_pause(
    context: Context, clock: SettableClock
) -> None:
    """B26, B27, B60"""
    delays = [timedelta(milliseconds=n) for n in range(25, 0, -1)]
    ids = schedule(context, *delays)
    clock.advance(SECOND)
    loop = DispatchEmbedded(context)
    assert loop.run_once() == 0.0
    assert states(context)[State.DISPATCHED] == 10
    broker = EmbeddedBroker(context.ledger, clock=clock)
    assert [each.message.id for each in broker.receive("c", limit=100)] == ids[:-11:-1]
    assert loop.run_once() == 0.0
    loop.run_once()
    assert states(context) == {State.DISPATCHED: 25}
    assert loop.run_once() > 0


def test_observers_hear_of_every_message_and_its_lateness(context: Context, clock: SettableClock, noted: Noted) -> None:
    """B39, B41, B65"""
    schedule(context, SECOND, 2 * SECOND)
    clock.advance(3 * SECOND)
    DispatchEmbedded(context).run_once()
    assert sorted(noted.lateness_ms) == [1000, 2000]
    assert noted.by_channel == {"c": 2}


def test_the_rate_limit_lets_so_many_through_and_no_more(ledger: Ledger, clock: SettableClock) -> None:
    """B29"""
    seconds = 0.0
    bucket = TokenBucket(20, now=lambda: seconds)
    context = Context(ledger=ledger, clock=clock, config=DispatcherConfig(batch=10), bucket=bucket)
    schedule(context, *[SECOND] * 12)
    clock.advance(SECOND)
    loop = DispatchEmbedded(context)
    assert loop.run_once() == 0.0
    assert states(context)[State.DISPATCHED] == 2
    assert 0 < loop.run_once() <= 0.05
    assert states(context)[State.DISPATCHED] == 2
    seconds = 0.1
    loop.run_once()
    assert states(context)[State.DISPATCHED] == 4


def test_loops_that_together_took_more_than_the_rate_limit_pause_until_it_is_made_up_for(
    ledger: Ledger, clock: SettableClock
) -> None:
    """B29: they look at the same moment and take afterwards."""
    bucket = TokenBucket(20, now=lambda: 0.0)
    context = Context(ledger=ledger, clock=clock, config=DispatcherConfig(), bucket=bucket)
    schedule(context, SECOND)
    clock.advance(SECOND)
    bucket.take(2 + 9)
    assert context.embedded_allowance() == (0, pytest.approx(0.5))


def test_messages_for_another_broker_are_claimed_sent_and_marked(
    context: Context, clock: SettableClock, noted: Noted
) -> None:
    """A18, B30"""
    elsewhere = EmbeddedBroker(Ledger("sqlite://"), clock=clock)
    message = Message(
        channel="c", payload=b"p", deliver_at=clock.now() + SECOND, key="k", headers={"h": "v"}, priority=7
    )
    schedule_elsewhere(context, message)
    loop = DispatchToBrokers(context, "there", lambda _: elsewhere)
    assert loop.run_once() > 0
    clock.advance(SECOND)
    loop.run_once()
    assert states(context) == {State.DISPATCHED: 1}
    assert [each.message for each in elsewhere.receive("c")] == [message]
    assert noted.lateness_ms == [0]


def test_messages_that_the_other_broker_did_not_confirm_wait_again_and_the_confirmed_ones_do_not(
    context: Context, clock: SettableClock
) -> None:
    """B36, A44"""

    class HalfConfirming(EmbeddedBroker):
        def send(self, messages: Sequence[Message]) -> list[Receipt]:
            super().send(messages[:1])
            raise BrokerError("gone", unconfirmed=[message.id for message in messages[1:]])

    elsewhere = HalfConfirming(Ledger("sqlite://"), clock=clock)
    schedule_elsewhere(context, *(Message(id=name, channel="c", payload=b"", deliver_at=clock.now()) for name in "ab"))
    loop = DispatchToBrokers(context, "there", lambda _: elsewhere)
    with pytest.raises(BrokerError, match="gone"):
        loop.run_once()
    assert states(context) == {State.SCHEDULED: 1, State.DISPATCHED: 1}
    with context.ledger.read() as connection:
        assert delivery.next_due_ms(connection, destination="there") is not None


def test_an_error_that_names_no_ids_leaves_all_messages_waiting(context: Context, clock: SettableClock) -> None:
    """B36"""

    class Unreachable(EmbeddedBroker):
        def send(self, messages: Sequence[Message]) -> list[Receipt]:  # noqa: ARG002 - the port's signature
            raise BrokerError("unreachable")

    schedule_elsewhere(context, Message(channel="c", payload=b"", deliver_at=clock.now()))
    elsewhere = Unreachable(Ledger("sqlite://"), clock=clock)
    with pytest.raises(BrokerError):
        DispatchToBrokers(context, "there", lambda _: elsewhere).run_once()
    assert states(context) == {State.SCHEDULED: 1}


def test_a_message_that_the_other_broker_refuses_for_good_is_dead_and_holds_up_no_other(
    context: Context, clock: SettableClock
) -> None:
    """A25"""
    elsewhere = EmbeddedBroker(Ledger("sqlite://"), clock=clock, limits=Limits(max_payload_bytes=3))
    schedule_elsewhere(
        context,
        Message(id="fits", channel="c", payload=b"abc", deliver_at=clock.now()),
        Message(id="too-large", channel="c", payload=b"abcd", deliver_at=clock.now()),
        Message(id="fits-too", channel="c", payload=b"abc", deliver_at=clock.now()),
    )
    DispatchToBrokers(context, "there", lambda _: elsewhere).run_once()
    assert [each.message.id for each in elsewhere.receive("c", limit=9)] == ["fits", "fits-too"]
    with context.ledger.read() as connection:
        assert listing.get(connection, "too-large").state is State.DEAD
        assert "max_payload_bytes" in (listing.get_history(connection, "too-large")[-1].reason or "")


def test_claims_of_a_dead_dispatcher_are_rescued_when_their_time_is_over(
    context: Context, clock: SettableClock
) -> None:
    """B32, B37, B61"""
    schedule_elsewhere(context, Message(channel="c", payload=b"", deliver_at=clock.now()))
    now_ms = context.now_ms()
    context.ledger.transact(
        lambda connection: delivery.claim_due(
            connection, destination="there", owner="dead", now_ms=now_ms, until_ms=now_ms + 1000, limit=1
        )
    )
    elsewhere = EmbeddedBroker(Ledger("sqlite://"), clock=clock)
    rescue, dispatch = RescueStale(context), DispatchToBrokers(context, "there", lambda _: elsewhere)
    assert rescue.run_once() == context.config.rescue_interval.total_seconds()
    dispatch.run_once()
    assert elsewhere.peek("c") == []
    clock.advance(timedelta(milliseconds=1001))
    rescue.run_once()
    dispatch.run_once()
    assert len(elsewhere.peek("c")) == 1


def prune_everything(prune: Prune) -> float:
    """Go through all pages, and return how long the loop pauses then."""
    return next(pause for pause in iter(prune.run_once, None) if pause)


def test_pruning_deletes_what_ended_before_the_retention_and_nothing_else(
    context: Context, clock: SettableClock
) -> None:
    """B66"""
    schedule(context, SECOND, channel="read")
    schedule(context, SECOND, channel="unread")
    waiting = schedule(context, timedelta(days=60), channel="read")
    clock.advance(SECOND)
    DispatchEmbedded(context).run_once()
    broker = EmbeddedBroker(context.ledger, clock=clock)
    broker.ack(broker.receive("read"))
    prune = Prune(context)
    prune_everything(prune)
    assert states(context) == {State.SCHEDULED: 1, State.DISPATCHED: 2}
    clock.advance(context.config.retention + SECOND)
    rows.fold_all(context.ledger)
    assert prune_everything(prune) == context.config.prune_interval.total_seconds()
    assert states(context) == {State.SCHEDULED: 1, State.DISPATCHED: 1}
    assert len(broker.peek("unread")) == 1
    with context.ledger.read() as connection:
        assert listing.get(connection, waiting[0]).state is State.SCHEDULED


def test_pruning_writes_nothing_where_nothing_is_old(
    context: Context, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search in a write transaction would keep all other writers waiting."""
    schedule(context, SECOND)
    clock.advance(SECOND)
    DispatchEmbedded(context).run_once()
    rows.fold_all(context.ledger)

    def refuse(*_arguments: object, **_options: object) -> None:
        pytest.fail("a write transaction")

    monkeypatch.setattr(type(context.ledger), "transact", refuse)
    assert prune_everything(Prune(context)) == context.config.prune_interval.total_seconds()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch": 0}, "batch"),
        ({"rate_limit": 0.0}, "rate limit"),
        ({"poll_interval": timedelta(0)}, "poll interval"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_their_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DispatcherConfig(**settings)


class Choosy(EmbeddedBroker):
    """Takes what a test lets it take, and says how often it was asked."""

    def __init__(self, clock: SettableClock, refuse: Callable[[Message], Exception | None]) -> None:
        super().__init__(Ledger("sqlite://"), clock=clock)
        self.refuse = refuse
        self.calls: list[list[str]] = []

    def send(self, messages: Sequence[Message]) -> list[Receipt]:
        self.calls.append([message.id for message in messages])
        for message in messages:
            if (error := self.refuse(message)) is not None:
                raise error
        return super().send(messages)


def run_until_idle(loop: DispatchToBrokers) -> None:
    while loop.run_once() == 0.0:
        pass


def missing(channel: str) -> Callable[[Message], Exception | None]:
    error = UnknownChannelError("channel", f"queue {channel!r} does not exist", "declare it")
    return lambda message: error if message.channel == channel else None


@pytest.fixture
def quiet(ledger: Ledger, clock: SettableClock) -> Context:
    """A dispatcher whose observers are notified of failures."""
    return Context(ledger=ledger, clock=clock, config=DispatcherConfig(batch=10))


def test_messages_for_a_missing_channel_wait_and_are_tried_one_at_a_time_beside_the_others(
    quiet: Context, clock: SettableClock
) -> None:
    """A12, B36"""
    elsewhere = Choosy(clock, missing("gone"))
    schedule_elsewhere(
        quiet,
        *(Message(id=f"gone-{n}", channel="gone", payload=b"", deliver_at=clock.now()) for n in range(25)),
        *(Message(id=f"good-{n}", channel="good", payload=b"", deliver_at=clock.now() + SECOND) for n in range(25)),
    )
    clock.advance(SECOND)
    loop = DispatchToBrokers(quiet, "there", lambda _: elsewhere)
    run_until_idle(loop)
    assert states(quiet) == {State.SCHEDULED: 25, State.DISPATCHED: 25}
    assert "queue 'gone' does not exist" in loop.troubles()["gone"]
    elsewhere.calls.clear()
    clock.advance(timedelta(minutes=1))
    run_until_idle(loop)
    assert elsewhere.calls == [["gone-0"]]
    elsewhere.refuse = lambda _message: None
    clock.advance(timedelta(minutes=1))
    run_until_idle(loop)
    assert states(quiet) == {State.DISPATCHED: 50}
    assert loop.troubles() == {}


def test_a_missing_channel_in_a_mixed_batch_holds_up_only_its_own_messages(
    quiet: Context, clock: SettableClock
) -> None:
    """A12, B36"""
    elsewhere = Choosy(clock, missing("gone"))
    channels = ["a", "gone", "b", "gone", "a"]
    schedule_elsewhere(quiet, *(Message(channel=each, payload=b"", deliver_at=clock.now()) for each in channels))
    loop = DispatchToBrokers(quiet, "there", lambda _: elsewhere)
    run_until_idle(loop)
    assert states(quiet) == {State.SCHEDULED: 2, State.DISPATCHED: 3}
    assert list(loop.troubles()) == ["gone"]


def test_a_channel_without_waiting_messages_is_no_longer_reported(quiet: Context, clock: SettableClock) -> None:
    elsewhere = Choosy(clock, missing("gone"))
    schedule_elsewhere(quiet, Message(id="m", channel="gone", payload=b"", deliver_at=clock.now()))
    loop = DispatchToBrokers(quiet, "there", lambda _: elsewhere)
    run_until_idle(loop)
    assert list(loop.troubles()) == ["gone"]
    EmbeddedBroker(quiet.ledger, clock=clock).cancel(["m"])
    run_until_idle(loop)
    assert loop.troubles() == {}


def test_one_refused_message_of_many_is_found_with_few_calls(quiet: Context, clock: SettableClock) -> None:
    """A25"""
    verdict = PayloadError("payload", "is too large", "send less")
    elsewhere = Choosy(clock, lambda message: verdict if message.id == "6" else None)
    schedule_elsewhere(
        quiet, *(Message(id=str(n), channel="c", payload=b"", deliver_at=clock.now()) for n in range(10))
    )
    DispatchToBrokers(quiet, "there", lambda _: elsewhere).run_once()
    assert states(quiet) == {State.DISPATCHED: 9, State.DEAD: 1}
    assert [each.message.id for each in elsewhere.receive("c", limit=10)] == [str(n) for n in range(10) if n != 6]
    assert len(elsewhere.calls) <= 9


def test_a_broker_that_confirms_all_but_one_channel_is_there_for_the_others(
    quiet: Context, clock: SettableClock
) -> None:
    """B36: as a topic without a leader."""

    class Leaderless(EmbeddedBroker):
        def send(self, messages: Sequence[Message]) -> list[Receipt]:
            super().send([message for message in messages if message.channel != "stuck"])
            raise BrokerError("no leader", unconfirmed=[each.id for each in messages if each.channel == "stuck"])

    elsewhere = Leaderless(Ledger("sqlite://"), clock=clock)
    schedule_elsewhere(
        quiet, *(Message(channel=each, payload=b"", deliver_at=clock.now()) for each in ("a", "stuck", "b"))
    )
    loop = DispatchToBrokers(quiet, "there", lambda _: elsewhere)
    loop.run_once()
    assert states(quiet) == {State.SCHEDULED: 1, State.DISPATCHED: 2}
    assert list(loop.troubles()) == ["stuck"]
