from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from airflow_delay_provider.brokers.ledger import delivery, listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.delivery import Claim
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.ledger_held import LedgerHeldBroker
from airflow_delay_provider.brokers.port import Broker, Outcome, Receipt
from airflow_delay_provider.domain.exceptions import (
    BrokerError,
    ChannelError,
    ConfigurationError,
    ConflictError,
    DelayError,
    LedgerError,
    PayloadError,
    Reach,
    UnknownChannelError,
    UnknownMessageError,
)
from airflow_delay_provider.domain.lifecycle import CLAIM, Change, State
from airflow_delay_provider.domain.message import Delivery, Message
from tests.contract.broker_contract import BrokerContract
from tests.contract.ledger_held import ForgetfulBroker, ForgetfulHarness

MILLISECOND = timedelta(milliseconds=1)


@pytest.fixture
def harness(shared_ledger: Ledger, tmp_path: Path) -> Iterator[ForgetfulHarness]:
    harness = ForgetfulHarness(shared_ledger, tmp_path)
    yield harness
    harness.close()


class TestLedgerHeldBroker(BrokerContract):
    """The port, with the ledger on SQLite and on PostgreSQL and the channels elsewhere."""


class Elsewhere(ForgetfulBroker):
    """A broker that fails where a test says so."""

    #: Raised instead of sending more than this many messages of a call.
    refuses: Exception | None = None
    confirms: int = 0
    missing: Sequence[str] = ()

    def send(self, messages: Sequence[Message]) -> list[Receipt]:
        if self.refuses is None:
            return super().send(messages)
        super().send(messages[: self.confirms])
        raise self.refuses

    def check_channels(self, channels: Iterable[str]) -> None:
        for channel in channels:
            if channel in self.missing:
                raise ConfigurationError(f"channel: {channel!r} does not exist; create it")


@pytest.fixture
def elsewhere(harness: ForgetfulHarness) -> Elsewhere:
    return Elsewhere(harness.target_ledger, clock=harness.clock)


@pytest.fixture
def broker(harness: ForgetfulHarness, elsewhere: Elsewhere) -> LedgerHeldBroker:
    """Sends through ``elsewhere``; the dispatcher of the harness does not."""
    return LedgerHeldBroker(harness.ledger, harness.destination, elsewhere, clock=harness.clock)


def state(harness: ForgetfulHarness, message: Message) -> State:
    with harness.ledger.read() as connection:
        return listing.get(connection, message.id).state


def changes(harness: ForgetfulHarness, message: Message) -> list[Change]:
    with harness.ledger.read() as connection:
        return [entry.change for entry in listing.get_history(connection, message.id)]


# -- scheduling --------------------------------------------------------------------------------------------------


def test_a_waiting_message_is_with_the_ledger_and_not_with_the_broker(harness: ForgetfulHarness):
    """A5, A6, A9, A20: any broker gets a scheduler, whatever it can delay by itself."""
    message = harness.message(harness.channel(), after=600)
    harness.broker.schedule([message])
    assert state(harness, message) is State.SCHEDULED
    with harness.target_ledger.read() as connection, pytest.raises(UnknownMessageError):
        listing.get(connection, message.id)


def test_a_channel_that_does_not_exist_is_found_before_anything_is_written(
    harness: ForgetfulHarness, broker: LedgerHeldBroker, elsewhere: Elsewhere
):
    """A12"""
    good, bad = harness.message(harness.channel(), after=600), harness.message(harness.channel(), after=600)
    elsewhere.missing = [bad.channel]
    for call in (broker.schedule, broker.send):
        with pytest.raises(ConfigurationError, match=f"{bad.channel}.* does not exist; create it"):
            call([good, bad])
    with pytest.raises(UnknownMessageError):
        state(harness, good)


def test_a_broker_that_cannot_be_asked_leaves_nothing_written_and_names_the_messages(
    harness: ForgetfulHarness, broker: LedgerHeldBroker, monkeypatch: pytest.MonkeyPatch
):
    """A12"""

    def unreachable(_channels: object) -> None:
        raise BrokerError("unreachable")

    monkeypatch.setattr(broker.target, "check_channels", unreachable)
    message = harness.message(harness.channel(), after=600)
    with pytest.raises(BrokerError, match="unreachable") as failed:
        broker.schedule([message])
    assert failed.value.unconfirmed == (message.id,)
    with pytest.raises(UnknownMessageError):
        state(harness, message)


def test_messages_that_the_broker_did_not_confirm_are_named_and_sent_by_the_dispatcher(
    harness: ForgetfulHarness, broker: LedgerHeldBroker, elsewhere: Elsewhere
):
    """A12, A44, B36"""
    channel = harness.channel()
    first, second, later = (harness.message(channel, after=after) for after in (-2, -1, 600))
    elsewhere.refuses, elsewhere.confirms = BrokerError("gone", unconfirmed=[second.id]), 1
    with pytest.raises(BrokerError, match=r"gone; .* stay in the ledger, and the dispatcher sends them") as failed:
        broker.schedule([first, second, later])
    assert failed.value.unconfirmed == (second.id,)
    assert [state(harness, each) for each in (first, second)] == [State.DISPATCHED, State.SCHEDULED]
    assert harness.ids_in(channel, 2) == [first.id, second.id]


def test_a_message_that_the_broker_refuses_for_good_is_given_up_by_the_dispatcher(
    harness: ForgetfulHarness, broker: LedgerHeldBroker, elsewhere: Elsewhere
):
    """A25"""
    message = harness.message(harness.channel(), after=0)
    elsewhere.refuses = PayloadError("payload", "is too large for this broker", "send less")
    with pytest.raises(PayloadError):
        broker.send([message])
    harness.target = elsewhere
    harness.dispatch()
    assert state(harness, message) is State.DEAD


@pytest.mark.parametrize(
    "trouble",
    [
        ConfigurationError("ca_file: cannot be used; name another"),
        ChannelError("topic c forgets messages after 1 ms; set its retention.ms"),
        UnknownChannelError("channel", "queue 'c' does not exist", "declare it"),
        BrokerError("user 'me' lacks a permission; grant it", may_pass=False, reach=Reach.CHANNEL),
        BrokerError("the login of user 'me' is refused; correct it", may_pass=False),
        ValueError("nobody has foreseen this"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_message_waits_while_its_error_can_be_repaired(
    harness: ForgetfulHarness, elsewhere: Elsewhere, trouble: Exception
):
    """A12, A25: only the broker's verdict on the message itself ends it."""
    channel = harness.channel()
    message = harness.message(channel, after=1)
    harness.broker.schedule([message])
    elsewhere.refuses, harness.target = trouble, elsewhere
    with suppress(DelayError):
        harness.pass_time(harness.units(1))
    assert state(harness, message) is State.SCHEDULED
    elsewhere.refuses = None
    assert harness.ids_in(channel, 1) == [message.id]


def test_after_a_crash_between_sending_and_marking_the_dispatcher_sends_it_again(
    harness: ForgetfulHarness, broker: LedgerHeldBroker, elsewhere: Elsewhere
):
    """B37, B61: at least once, with the same id."""

    class Killed(BaseException):
        pass

    elsewhere.refuses, elsewhere.confirms = Killed(), 1  # type: ignore[assignment]
    channel = harness.channel()
    message = harness.message(channel, after=0)
    with pytest.raises(Killed):
        broker.send([message])
    assert harness.ids_in(channel, 1) == [message.id]
    assert state(harness, message) is State.SCHEDULED
    harness.pass_time(CLAIM + MILLISECOND)
    assert harness.ids_in(channel, 1) == [message.id]
    assert state(harness, message) is State.DISPATCHED


@pytest.mark.parametrize("is_being_sent", [False, True])
def test_while_the_dispatcher_lags_no_message_overtakes_an_earlier_one_of_its_key(
    harness: ForgetfulHarness, is_being_sent: bool
):
    """B53, A46"""
    channel = harness.channel()
    harness.broker.schedule([harness.message(channel, after=0, key="k")])
    [in_hand] = harness.receive(channel, 1)
    harness.broker.schedule([harness.message(channel, after=1, key="k")])
    harness.clock.advance(harness.units(3))
    if is_being_sent:
        assert len(claim_due(harness)) == 1
    same, other = (harness.message(channel, after=0, key=key) for key in ("k", "other"))
    receipts = harness.broker.schedule([same, other])
    assert [receipt.outcome for receipt in receipts] == [Outcome.SCHEDULED, Outcome.DISPATCHED]
    harness.broker.requeue(in_hand, timedelta(0))
    assert harness.broker.peek(channel, limit=10) == [other]
    harness.pass_time(CLAIM + MILLISECOND)
    assert len(harness.ids_in(channel, 4)) == 4


def test_an_id_of_another_broker_is_refused(harness: ForgetfulHarness):
    """A28: two messages, and only one could be found by it."""
    channel = harness.channel()
    message = harness.message(channel, after=600)
    EmbeddedBroker(harness.ledger, clock=harness.clock).schedule([message])
    with pytest.raises(ConflictError, match=r"already exists for an embedded channel, not for connection 'target-"):
        harness.broker.schedule([message])


# -- consumers ---------------------------------------------------------------------------------------------------


def claim_due(harness: ForgetfulHarness) -> list[Claim]:
    """Claim as a dispatcher does that has not sent yet."""
    now_ms = harness.context.now_ms()
    return harness.ledger.transact(
        lambda connection: delivery.claim_due(
            connection,
            destination=harness.destination,
            owner="another",
            now_ms=now_ms,
            until_ms=now_ms + CLAIM // MILLISECOND,
            limit=10,
        )
    )


def received_before_it_was_marked(harness: ForgetfulHarness, channel: str) -> tuple[list[Claim], Delivery]:
    """A message that a consumer has while its dispatcher has not heard the confirmation yet."""
    harness.broker.schedule([harness.message(channel, after=1)])
    harness.clock.advance(harness.units(1))
    claims = claim_due(harness)
    harness.target.send([claim.message for claim in claims])
    [in_hand] = harness.target.receive(channel)
    return claims, in_hand


def mark(harness: ForgetfulHarness, claims: list[Claim]) -> None:
    now_ms = harness.context.now_ms()
    harness.ledger.transact(lambda connection: delivery.mark_dispatched(connection, claims, now_ms=now_ms))


def test_a_message_that_is_requeued_before_its_dispatch_is_marked_is_not_lost(harness: ForgetfulHarness):
    """A23, B33"""
    channel = harness.channel()
    claims, in_hand = received_before_it_was_marked(harness, channel)
    harness.broker.requeue(in_hand, harness.units(5))
    mark(harness, claims)
    assert state(harness, in_hand.message) is State.SCHEDULED
    harness.pass_time(harness.units(5))
    [again] = harness.receive(channel, 1)
    assert (again.message.id, again.message.handled_count) == (in_hand.message.id, 1)
    assert changes(harness, in_hand.message) == [
        Change.SCHEDULED,
        Change.DISPATCHED,
        Change.REQUEUED,
        Change.DISPATCHED,
    ]


def test_a_message_that_is_dead_lettered_before_its_dispatch_is_marked_stays_dead(harness: ForgetfulHarness):
    """A25, B33"""
    channel = harness.channel()
    claims, in_hand = received_before_it_was_marked(harness, channel)
    harness.broker.dead_letter(in_hand, channel=f"{channel}.dead", reason="bad")
    mark(harness, claims)
    assert state(harness, in_hand.message) is State.DEAD
    assert changes(harness, in_hand.message) == [Change.SCHEDULED, Change.DISPATCHED, Change.DEAD_LETTERED]


def test_a_message_is_acknowledged_only_after_the_ledger_has_it_again(harness: ForgetfulHarness):
    """A23: a crash in between brings it twice, never not at all."""
    channel = harness.channel()
    harness.broker.send([harness.message(channel, after=0)])
    [in_hand] = harness.receive(channel, 1, visibility=harness.units(1))
    nowhere = Ledger("postgresql://delay:secret@127.0.0.1:1/nowhere")
    broken = LedgerHeldBroker(nowhere, harness.destination, harness.target, clock=harness.clock)
    with pytest.raises(LedgerError):
        broken.requeue(in_hand, timedelta(0))
    harness.pass_time(harness.units(1))
    assert harness.ids_in(channel, 1) == [in_hand.message.id]


def test_while_it_is_acknowledged_no_dispatcher_sends_it(
    harness: ForgetfulHarness, broker: LedgerHeldBroker, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
):
    """A23: a message whose acknowledgement fails is still requeued once."""
    channel = harness.channel()
    broker.send([harness.message(channel, after=0)])
    [in_hand] = harness.receive(channel, 1)
    acknowledge = elsewhere.ack

    def lose_the_connection(deliveries: list[Delivery]) -> None:
        harness.dispatch()
        assert harness.broker.peek(channel) == []
        acknowledge(deliveries)
        raise BrokerError("gone")

    monkeypatch.setattr(elsewhere, "ack", lose_the_connection)
    with pytest.raises(BrokerError):
        broker.requeue(in_hand, timedelta(0))
    [again] = harness.receive(channel, 1)
    assert (again.message.id, again.message.handled_count) == (in_hand.message.id, 1)


def test_a_message_that_went_to_another_consumer_stays_dispatched(harness: ForgetfulHarness):
    channel = harness.channel()
    harness.broker.send([harness.message(channel, after=0)])
    [lost] = harness.receive(channel, 1, visibility=harness.units(1))
    harness.pass_time(harness.units(1))
    [held] = harness.receive(channel, 1)
    with pytest.raises(Exception, match="visibility ended"):
        harness.broker.requeue(lost, harness.units(5))
    assert state(harness, lost.message) is State.DISPATCHED
    harness.broker.requeue(held, harness.units(5))
    harness.pass_time(harness.units(5))
    assert harness.ids_in(channel, 1) == [held.message.id]
    assert harness.broker.receive(channel) == []


def test_a_second_copy_that_is_requeued_is_merged_with_the_first(harness: ForgetfulHarness):
    """B61: after a crash a message may be in its channel twice."""
    channel = harness.channel()
    claims, first = received_before_it_was_marked(harness, channel)
    harness.broker.requeue(first, harness.units(5))
    harness.target.send([claims[0].message])
    [second] = harness.target.receive(channel)
    harness.broker.requeue(second, harness.units(5))
    harness.pass_time(harness.units(5))
    assert harness.ids_in(channel, 1) == [first.message.id]
    assert harness.broker.receive(channel) == []


def test_a_message_that_the_ledger_does_not_know_can_be_requeued(harness: ForgetfulHarness):
    """A15: others send to that channel too."""
    channel = harness.channel()
    position = harness.broker.journal_end()
    harness.target.send([harness.message(channel, after=0, payload=b"theirs", headers={"a": "b"})])
    [in_hand] = harness.receive(channel, 1)
    harness.broker.requeue(in_hand, harness.units(5), reason="not yet")
    harness.pass_time(harness.units(5))
    [again] = harness.receive(channel, 1)
    assert again.message == in_hand.message.requeued(again.message.deliver_at)
    harness.wait_until(lambda: bool(harness.broker.read_journal(after=position)), "the journal has it")
    assert harness.broker.read_journal(after=position)[0].reason == "not yet"


def test_a_message_that_the_ledger_does_not_know_can_be_dead_lettered(harness: ForgetfulHarness):
    channel = harness.channel()
    harness.target.send([harness.message(channel, after=0)])
    [in_hand] = harness.receive(channel, 1)
    harness.broker.dead_letter(in_hand, channel=f"{channel}.dead", reason="bad")
    assert [dead.message for dead in harness.dead_letters(channel)] == [in_hand.message]


# -- life --------------------------------------------------------------------------------------------------------


def test_the_check_names_both_ledgers(harness: ForgetfulHarness):
    assert harness.ledger.name in harness.broker.check()
    assert harness.target_ledger.name in harness.broker.check()


def test_closing_closes_both(harness: ForgetfulHarness, monkeypatch: pytest.MonkeyPatch):
    closed: list[object] = []

    class Failing(ForgetfulBroker):
        def close(self) -> None:
            closed.append(self)
            raise BrokerError("gone")

    ledger = Ledger("sqlite://")
    monkeypatch.setattr(ledger, "close", lambda: closed.append(ledger))
    target: Broker = Failing(harness.target_ledger)
    with pytest.raises(BrokerError):
        LedgerHeldBroker(ledger, "there", target).close()
    assert closed == [target, ledger]
