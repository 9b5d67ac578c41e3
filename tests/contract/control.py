from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest

from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.arguments import Limits
from airflow_delay_provider.domain.exceptions import (
    InvalidMessageError,
    LifecycleError,
    TooFarError,
    TooSoonError,
    UnknownMessageError,
)
from tests.contract.harness import BrokerHarness, run_together

Control = Callable[[Broker, list[str]], None]


def cancel(broker: Broker, message_ids: list[str]) -> None:
    broker.cancel(message_ids)


def expedite(broker: Broker, message_ids: list[str]) -> None:
    broker.expedite(message_ids)


def reschedule(broker: Broker, message_ids: list[str]) -> None:
    broker.reschedule(message_ids, broker.clock.now())


CONTROLS = [cancel, reschedule, expedite]


class ControlContract:
    """A waiting message can be called back, moved and hurried."""

    @pytest.fixture(autouse=True)
    def _recalls(self, harness: BrokerHarness) -> None:
        harness.needs("recall")

    def test_a_cancelled_message_is_never_delivered(self, harness: BrokerHarness):
        """A27, B56, C13, D19"""
        channel = harness.channel()
        cancelled, stays = harness.message(channel, after=2), harness.message(channel, after=2)
        harness.broker.schedule([cancelled, stays])
        harness.broker.cancel([cancelled.id])
        harness.pass_time(harness.units(2))
        assert harness.ids_in(channel, 1) == [stays.id]
        assert harness.broker.receive(channel) == []

    def test_cancelling_twice_is_no_error(self, harness: BrokerHarness):
        """A27"""
        message = harness.message(harness.channel(), after=600)
        harness.broker.schedule([message])
        harness.broker.cancel([message.id])
        harness.broker.cancel([message.id, message.id])

    def test_a_message_moved_to_a_later_time_does_not_come_at_the_old_one(self, harness: BrokerHarness):
        """A27, B59"""
        channel = harness.channel()
        message = harness.message(channel, after=2)
        harness.broker.schedule([message])
        later, has_passed = harness.broker.clock.now() + harness.units(3), harness.timer(harness.units(3))
        harness.broker.reschedule([message.id], later)
        harness.pass_time(harness.units(2))
        harness.assert_nothing_before(has_passed, channel)
        harness.pass_time(harness.units(1))
        [delivery] = harness.receive(channel, 1)
        assert delivery.message.id == message.id
        assert delivery.message.deliver_at >= later

    def test_a_message_moved_to_an_earlier_time_comes_then(self, harness: BrokerHarness):
        """A27, B59"""
        channel = harness.channel()
        message = harness.message(channel, after=600)
        harness.broker.schedule([message])
        has_passed = harness.timer(harness.units(1))
        harness.broker.reschedule([message.id], harness.broker.clock.now() + harness.units(1))
        harness.dispatch()
        harness.assert_nothing_before(has_passed, channel)
        harness.pass_time(harness.units(1))
        assert harness.ids_in(channel, 1) == [message.id]

    def test_an_expedited_message_comes_now(self, harness: BrokerHarness):
        channel = harness.channel()
        messages = [harness.message(channel, after=after) for after in (600, 700)]
        harness.broker.schedule(messages)
        harness.broker.expedite([message.id for message in messages])
        assert sorted(harness.ids_in(channel, 2)) == sorted(message.id for message in messages)

    @pytest.mark.parametrize("control", CONTROLS)
    def test_an_unknown_id_is_named(self, harness: BrokerHarness, control: Control):
        """B13"""
        unknown = harness.message("any", after=1).id
        with pytest.raises(UnknownMessageError, match=unknown) as refused:
            control(harness.broker, [unknown])
        assert refused.value.message_id == unknown

    @pytest.mark.parametrize("control", CONTROLS)
    def test_one_refused_message_leaves_all_of_the_call_unchanged(self, harness: BrokerHarness, control: Control):
        """A29"""
        channel = harness.channel()
        message = harness.message(channel, after=2)
        harness.broker.schedule([message])
        with pytest.raises(UnknownMessageError):
            control(harness.broker, [message.id, "no-such-id"])
        harness.dispatch()
        harness.assert_waits(message)
        harness.pass_time(harness.units(2))
        [delivery] = harness.receive(channel, 1)
        assert delivery.message == message

    @pytest.mark.parametrize("control", CONTROLS)
    def test_a_dispatched_message_cannot_be_called_back(self, harness: BrokerHarness, control: Control):
        """B22"""
        channel = harness.channel()
        message = harness.message(channel, after=-1)
        harness.broker.schedule([message])
        with pytest.raises(LifecycleError, match=rf"{message.id}.* DISPATCHED .*only a scheduled message"):
            control(harness.broker, [message.id])
        assert harness.ids_in(channel, 1) == [message.id]

    @pytest.mark.parametrize("control", [reschedule, expedite])
    def test_a_cancelled_message_cannot_be_revived(self, harness: BrokerHarness, control: Control):
        """B22"""
        channel = harness.channel()
        message = harness.message(channel, after=600)
        harness.broker.schedule([message])
        harness.broker.cancel([message.id])
        with pytest.raises(LifecycleError, match=rf"{message.id}.* CANCELLED"):
            control(harness.broker, [message.id])

    @pytest.mark.parametrize("control", CONTROLS)
    def test_no_ids_are_no_error(self, harness: BrokerHarness, control: Control):
        control(harness.broker, [])

    def test_a_time_without_zone_is_refused(self, harness: BrokerHarness):
        """A30"""
        message = harness.message(harness.channel(), after=600)
        harness.broker.schedule([message])
        with pytest.raises(InvalidMessageError, match=r"deliver_at: .* has no time zone"):
            harness.broker.reschedule([message.id], datetime(2040, 1, 1))  # noqa: DTZ001 - what is refused

    def test_moving_obeys_the_limits_of_the_connection(self, harness: BrokerHarness):
        """A30, B4"""
        channel = harness.channel()
        broker = harness.open(limits=Limits(min_delay=harness.units(5), max_delay=harness.units(10)))
        message = harness.message(channel, after=9)
        broker.schedule([message])
        for error, after in ((TooSoonError, 1), (TooFarError, 20)):
            with pytest.raises(error):
                broker.reschedule([message.id], broker.clock.now() + harness.units(after))

    def test_of_many_that_cancel_and_dispatch_at_once_one_wins(self, harness: BrokerHarness):
        """A29: a cancel that was confirmed holds, and one that came too late says so."""
        channel = harness.channel()
        messages = [harness.message(channel, after=1) for _ in range(20)]
        harness.broker.schedule(messages)
        cancellers = [harness.open() for _ in range(3)]
        results = run_together(
            [
                lambda: harness.pass_time(harness.units(1)),
                *(
                    lambda broker=broker: [_cancels(broker, message.id) for message in messages]
                    for broker in cancellers
                ),
            ]
        )
        assert [result for result in results if isinstance(result, BaseException)] == []
        recalled = {
            message.id
            for message, answers in zip(messages, zip(*results[1:], strict=True), strict=True)  # type: ignore[arg-type]
            if any(answers)
        }
        arrived = harness.ids_in(channel, len(messages) - len(recalled)) if len(recalled) < len(messages) else []
        assert set(arrived) == {message.id for message in messages} - recalled
        assert harness.broker.receive(channel) == []


def _cancels(broker: Broker, message_id: str) -> bool:
    try:
        broker.cancel([message_id])
    except LifecycleError:
        return False
    return True
