from __future__ import annotations

from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.consumer import Consumed, Consumer, ConsumerConfig
from airflow_delay_provider.domain.exceptions import DeferMessage, LifecycleError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Delivery, Message
from tests.contract.harness import BrokerHarness, run_together
from tests.contract.journal import Tail


class ConsumingContract:
    """A channel delivers dispatched messages until they are settled."""

    def sent(self, harness: BrokerHarness, channel: str, **options: object) -> Message:
        message = harness.message(channel, after=0, **options)
        harness.broker.send([message])
        return message

    def delivered(self, harness: BrokerHarness, channel: str, **options: object) -> Delivery:
        self.sent(harness, channel, **options)
        [delivery] = harness.receive(channel, 1)
        return delivery

    def test_an_acknowledged_message_is_gone(self, harness: BrokerHarness):
        channel = harness.channel()
        harness.broker.ack([self.delivered(harness, channel)])
        assert harness.broker.peek(channel) == []
        assert harness.broker.receive(channel) == []

    def test_a_message_in_hand_is_not_handed_out_twice(self, harness: BrokerHarness):
        channel = harness.channel()
        self.delivered(harness, channel)
        assert harness.broker.peek(channel) == []
        assert harness.broker.receive(channel) == []

    def test_peeking_leaves_everything_as_it_was(self, harness: BrokerHarness):
        channel = harness.channel()
        message = self.sent(harness, channel)
        for _ in range(2):
            assert harness.see(channel, 1, limit=2) == [message]
        [delivery] = harness.receive(channel, 1)
        assert delivery.message == message

    def test_no_more_than_asked_is_handed_out(self, harness: BrokerHarness):
        channel = harness.channel()
        for _ in range(3):
            self.sent(harness, channel)
        assert len(harness.receive(channel, 2)) == 2
        assert len(harness.receive(channel, 1)) == 1

    def test_a_channel_that_nothing_was_sent_to_is_empty(self, harness: BrokerHarness):
        channel = harness.channel()
        assert harness.broker.receive(channel, limit=5) == []
        assert harness.broker.peek(channel, limit=5) == []

    def test_a_released_message_comes_again_and_counts_nothing(self, harness: BrokerHarness):
        channel = harness.channel()
        delivery = self.delivered(harness, channel)
        harness.broker.release([delivery])
        [again] = harness.receive(channel, 1)
        assert again.message == delivery.message

    def test_a_message_released_with_a_delay_comes_again_after_it(self, harness: BrokerHarness):
        channel = harness.channel()
        delivery = self.delivered(harness, channel)
        is_back = harness.timer(harness.units(2))
        harness.broker.release([delivery], delay=harness.units(2))
        harness.assert_nothing_before(is_back, channel)
        harness.pass_time(harness.units(1))
        harness.assert_nothing_before(is_back, channel)
        harness.pass_time(harness.units(1))
        [again] = harness.receive(channel, 1)
        assert again.message == delivery.message

    def test_an_unacknowledged_message_is_delivered_again_when_its_visibility_ends(self, harness: BrokerHarness):
        """A23, D12: a consumer that died has handled it once."""
        harness.needs("visibility")
        channel = harness.channel()
        message = self.sent(harness, channel)
        counts = []
        for _ in range(3):
            [delivery] = harness.receive(channel, 1, visibility=harness.units(1))
            assert delivery.message.id == message.id
            counts.append(delivery.message.handled_count)
            harness.pass_time(harness.units(1))
        assert counts == [0, 1, 2]

    @pytest.mark.parametrize("settle", ["ack", "release", "requeue", "dead_letter"])
    def test_a_message_that_went_to_another_consumer_cannot_be_settled(self, harness: BrokerHarness, settle: str):
        harness.needs("visibility")
        channel = harness.channel()
        self.sent(harness, channel)
        [lost] = harness.receive(channel, 1, visibility=harness.units(1))
        harness.pass_time(harness.units(1))
        [held] = harness.receive(channel, 1)
        with pytest.raises(LifecycleError, match=rf"{lost.message.id}.*visibility ended; settle sooner or raise"):
            self.settle(harness, settle, lost)
        harness.broker.ack([held])
        assert harness.broker.peek(channel) == []
        assert harness.broker.peek(f"{channel}.dead") == []

    def settle(self, harness: BrokerHarness, how: str, delivery: Delivery) -> None:
        match how:
            case "ack":
                harness.broker.ack([delivery])
            case "release":
                harness.broker.release([delivery])
            case "requeue":
                harness.broker.requeue(delivery, timedelta(0))
            case "dead_letter":
                harness.broker.dead_letter(delivery, channel=f"{delivery.message.channel}.dead", reason="bad")

    def test_consumers_side_by_side_share_the_messages(self, harness: BrokerHarness):
        """B32"""
        harness.needs("shares_messages")
        channel = harness.channel()
        messages = [harness.message(channel, after=0) for _ in range(60)]
        harness.broker.send(messages)
        brokers = [harness.open() for _ in range(4)]
        results = run_together(
            [lambda broker=broker: [broker.receive(channel, limit=5) for _ in range(3)] for broker in brokers]
        )
        assert [result for result in results if isinstance(result, BaseException)] == []
        handed_out = [d.message.id for result in results for batch in result for d in batch]  # type: ignore[union-attr]
        assert len(handed_out) == len(set(handed_out))
        rest = harness.receive(channel, 60 - len(handed_out)) if len(handed_out) < 60 else []
        assert {*handed_out, *(d.message.id for d in rest)} == {message.id for message in messages}

    # -- putting back --------------------------------------------------------------------------------------------

    def test_a_requeued_message_comes_again_after_its_delay_with_a_raised_count(self, harness: BrokerHarness):
        """A1, A17, A23, A37, A40"""
        channel = harness.channel()
        delivery = self.delivered(harness, channel, key="k", headers={"a": "b"}, priority=2)
        is_back = harness.timer(harness.units(2))
        harness.broker.requeue(delivery, harness.units(2))
        harness.pass_time(harness.units(1))
        harness.assert_nothing_before(is_back, channel)
        harness.pass_time(harness.units(1))
        [again] = harness.receive(channel, 1)
        assert again.message == delivery.message.requeued(again.message.deliver_at)
        assert again.message.handled_count == 1
        assert again.message.deliver_at >= delivery.message.deliver_at + harness.units(2)

    @pytest.mark.parametrize("seconds", [0, -5])
    def test_requeueing_without_a_delay_puts_it_back_at_once(self, harness: BrokerHarness, seconds: float):
        """A10, A23"""
        channel = harness.channel()
        harness.broker.requeue(self.delivered(harness, channel), timedelta(seconds=seconds))
        [again] = harness.receive(channel, 1)
        assert again.message.handled_count == 1

    def test_a_message_can_be_requeued_again_and_again(self, harness: BrokerHarness):
        """A23, A46"""
        channel = harness.channel()
        self.sent(harness, channel)
        for handled in range(4):
            [delivery] = harness.receive(channel, 1)
            assert delivery.message.handled_count == handled
            harness.broker.requeue(delivery, timedelta(0), reason=f"time {handled}")

    def test_a_requeue_goes_to_the_messages_own_channel_wherever_it_was_consumed(self, harness: BrokerHarness):
        """A15"""
        channel = harness.channel()
        elsewhere = harness.channel()
        harness.broker.dead_letter(self.delivered(harness, channel), channel=elsewhere, reason="bad")
        [found] = harness.receive(elsewhere, 1)
        assert found.message.channel == channel
        harness.broker.requeue(found, harness.units(1))
        harness.pass_time(harness.units(1))
        [again] = harness.receive(channel, 1)
        assert again.message.id == found.message.id
        assert harness.broker.receive(elsewhere) == []

    def test_a_dead_letter_is_known_by_its_own_channel_and_keeps_its_content(self, harness: BrokerHarness):
        """A25"""
        channel = harness.channel()
        delivery = self.delivered(harness, channel, payload=b"poison", headers={"a": "b"})
        harness.broker.dead_letter(delivery, channel=f"{channel}.dead", reason="cannot be read")
        assert harness.broker.receive(channel) == []
        [dead] = harness.dead_letters(channel)
        assert dead.message == delivery.message
        harness.broker.ack([dead])
        assert harness.broker.peek(f"{channel}.dead") == []

    def test_a_requeued_dead_letter_is_delivered_and_handled_like_any_other(self, harness: BrokerHarness):
        """A25"""
        channel = harness.channel()
        delivery = self.delivered(harness, channel)
        harness.broker.dead_letter(delivery, channel=f"{channel}.dead", reason="bad")
        [dead] = harness.dead_letters(channel)
        harness.broker.requeue(dead, timedelta(0))
        [again] = harness.receive(channel, 1)
        assert again.message.id == delivery.message.id
        harness.broker.dead_letter(again, channel=f"{channel}.dead", reason="still bad")
        [dead_again] = harness.dead_letters(channel)
        harness.broker.ack([dead_again])

    @pytest.mark.parametrize("reason", ["", "a\0b", "\udcff", "x" * 50_000], ids=["none", "nul", "surrogate", "long"])
    def test_any_text_is_good_enough_for_a_reason(self, harness: BrokerHarness, reason: str):
        """A25: the text of an exception must not make a poison message immortal."""
        channel = harness.channel()
        harness.broker.dead_letter(self.delivered(harness, channel), channel=f"{channel}.dead", reason=reason)
        assert len(harness.dead_letters(channel)) == 1

    def test_a_message_scheduled_again_before_it_was_acknowledged_comes_again(self, harness: BrokerHarness):
        """A23, B61: a consumer that reposts by itself and dies before its ack must not block others."""
        channel, other = harness.channel(), harness.channel()
        delivery = self.delivered(harness, channel)
        harness.broker.schedule([delivery.message.requeued(harness.broker.clock.now() + harness.units(1))])
        bystander = harness.message(other, after=1)
        harness.broker.schedule([bystander])
        harness.pass_time(harness.units(1))
        assert harness.ids_in(other, 1) == [bystander.id]
        [again] = harness.receive(channel, 1)
        assert (again.message.id, again.message.handled_count) == (delivery.message.id, 1)

    # -- the consumer loop ---------------------------------------------------------------------------------------

    def consume(self, harness: BrokerHarness, channel: str, handler: object, **config: object) -> Consumed:
        """Handle one message, waiting for it where the broker needs time."""
        consumer = Consumer(harness.broker, channel, handler, config=ConsumerConfig(**config))  # type: ignore[arg-type]
        consumed = Consumed()

        def did_something() -> bool:
            nonlocal consumed
            consumed = consumer.run_once()
            return consumed.total > 0

        harness.wait_until(did_something, f"a message in {channel}")
        return consumed

    def test_a_handler_that_returns_acknowledges(self, harness: BrokerHarness):
        channel = harness.channel()
        message = self.sent(harness, channel)
        handled: list[Message] = []
        assert self.consume(harness, channel, handled.append) == Consumed(handled=1)
        assert handled == [message]
        assert harness.broker.peek(channel) == []

    def test_a_handler_that_defers_is_called_again_after_the_delay_and_blocks_no_other(self, harness: BrokerHarness):
        """A1, A2, A17"""
        channel = harness.channel()
        deferred, for_long, other = (self.sent(harness, channel) for _ in range(3))
        delays = {deferred.id: harness.units(3), for_long.id: harness.units(600)}
        handled: list[Message] = []

        def handle(message: Message) -> None:
            handled.append(message)
            if message.id in delays and message.handled_count == 0:
                raise DeferMessage(delays[message.id].total_seconds(), "the service is down")

        is_back = harness.timer(harness.units(3))
        # One that waited for the second message would not come to an end.
        consumed = Consumer(harness.broker, channel, handle).run(limit=3, timeout=harness.patience)
        assert consumed == Consumed(handled=1, deferred=2)
        assert {message.id for message in handled} == {deferred.id, for_long.id, other.id}
        harness.assert_nothing_before(is_back, channel)
        harness.pass_time(harness.units(3))
        assert self.consume(harness, channel, handle) == Consumed(handled=1)
        assert (handled[-1].id, handled[-1].handled_count) == (deferred.id, 1)

    def test_a_message_deferred_above_the_threshold_goes_to_the_dead_letter_channel(self, harness: BrokerHarness):
        """A23, A24, A25"""
        channel = harness.channel()
        message = self.sent(harness, channel)
        tail = Tail(harness.broker)
        counts: list[int] = []

        def defer(message: Message) -> None:
            counts.append(message.handled_count)
            raise DeferMessage(0, "not yet")

        results = [self.consume(harness, channel, defer, max_handled=2) for _ in range(3)]
        assert results == [Consumed(deferred=1), Consumed(deferred=1), Consumed(dead_lettered=1)]
        assert counts == [0, 1, 2]
        [dead] = harness.dead_letters(channel)
        assert dead.message.id == message.id
        assert "not yet" in self.dead_letter_reason(harness, tail, message)

    def test_a_replayed_dead_letter_is_handled_again_from_the_start(self, harness: BrokerHarness):
        """A24, A25"""
        channel = harness.channel()
        self.sent(harness, channel)

        def defer(message: Message) -> None:
            raise DeferMessage(0)

        for _ in range(2):
            self.consume(harness, channel, defer, max_handled=1)
        [dead] = harness.dead_letters(channel)
        harness.broker.requeue(dead, timedelta(0))
        handled: list[Message] = []
        assert self.consume(harness, channel, handled.append, max_handled=1) == Consumed(handled=1)
        assert [message.handled_count for message in handled] == [0]

    def test_a_message_that_ended_every_consumer_is_not_handed_to_another(self, harness: BrokerHarness):
        """A24, A25: a poison message that kills the process never reaches the code that counts."""
        harness.needs("visibility")
        channel = harness.channel()
        self.sent(harness, channel)
        for _ in range(3):
            harness.receive(channel, 1, visibility=harness.units(1))
            harness.pass_time(harness.units(1))
        handled: list[Message] = []
        assert self.consume(harness, channel, handled.append, max_handled=2) == Consumed(dead_lettered=1)
        assert handled == []

    def test_a_handler_that_fails_sends_the_message_to_the_dead_letter_channel_with_the_reason(
        self, harness: BrokerHarness
    ):
        """A25"""
        channel = harness.channel()
        message = self.sent(harness, channel)
        tail = Tail(harness.broker)

        def fail(message: Message) -> None:
            raise KeyError("amount")

        assert self.consume(harness, channel, fail) == Consumed(dead_lettered=1)
        assert self.dead_letter_reason(harness, tail, message) == "KeyError: 'amount'"
        [dead] = harness.dead_letters(channel)
        assert dead.message.id == message.id

    def test_the_dead_letter_channel_can_be_chosen(self, harness: BrokerHarness):
        """A25"""
        channel, chosen = harness.channel(), harness.channel()
        message = self.sent(harness, channel)
        self.consume(harness, channel, lambda _message: 1 / 0, dead_letter_channel=chosen)
        assert harness.ids_in(chosen, 1) == [message.id]

    def test_a_consumer_goes_on_when_a_message_was_taken_from_it(self, harness: BrokerHarness):
        """A2: a handler slower than the visibility costs a second delivery, not the consumer."""
        harness.needs("visibility")
        channel = harness.channel()
        slow, quick = self.sent(harness, channel, payload=b"slow"), self.sent(harness, channel, payload=b"quick")
        handled: list[str] = []

        def handle(message: Message) -> None:
            handled.append(message.id)
            if message.id == slow.id:
                harness.pass_time(harness.units(1))
                harness.receive(channel, 1)

        harness.wait_until(lambda: len(harness.broker.peek(channel, limit=2)) == 2, "both messages")
        config = ConsumerConfig(visibility=harness.units(1))
        Consumer(harness.broker, channel, handle, config=config).run_once()
        assert set(handled) == {slow.id, quick.id}

    def test_a_run_ends_after_its_limit(self, harness: BrokerHarness):
        channel = harness.channel()
        for _ in range(5):
            self.sent(harness, channel)
        harness.wait_until(lambda: len(harness.broker.peek(channel, limit=5)) == 5, "all messages")
        consumer = Consumer(harness.broker, channel, lambda _message: None, config=ConsumerConfig(prefetch=2))
        assert consumer.run(limit=3) == Consumed(handled=3)
        assert len(harness.receive(channel, 2)) == 2

    def test_a_run_ends_after_its_time(self, harness: BrokerHarness):
        consumer = Consumer(harness.broker, harness.channel(), lambda _message: None)
        assert consumer.run(timeout=timedelta(0)) == Consumed()

    def dead_letter_reason(self, harness: BrokerHarness, tail: Tail, message: Message) -> str:
        reasons: list[str | None] = []

        def recorded() -> bool:
            tail.read()
            reasons[:] = [entry.reason for entry in tail.of([message]) if entry.change is Change.DEAD_LETTERED]
            return bool(reasons)

        harness.wait_until(recorded, f"the journal has the end of {message.id}")
        [reason] = reasons
        return reason or ""
