from __future__ import annotations

from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.port import Broker, Outcome
from airflow_delay_provider.domain.arguments import Limits, compose_message
from airflow_delay_provider.domain.exceptions import InvalidMessageError, PayloadError, TooFarError, TooSoonError
from airflow_delay_provider.domain.message import Message, Origin
from tests.contract.harness import BrokerHarness, run_together


class SchedulingContract:
    """A message waits, and arrives as it was given."""

    def test_a_message_is_never_early_and_arrives_after_its_due_time(self, harness: BrokerHarness):
        """A3, A11, A18, A31, A36, C9, D14, E12"""
        channel = harness.channel()
        message, late = harness.message(channel, after=2), harness.message(channel, after=600)
        receipts = harness.broker.schedule([message, late])
        assert [receipt.message_id for receipt in receipts] == [message.id, late.id]
        assert receipts[1].outcome is Outcome.SCHEDULED
        harness.dispatch()
        harness.assert_waits(message)
        harness.pass_time(harness.units(1))
        harness.assert_waits(message)
        harness.pass_time(harness.units(1))
        [delivery] = harness.receive(channel, 1)
        assert delivery.message.id == message.id
        assert harness.broker.clock.now() >= message.deliver_at

    def test_a_short_delay_is_not_held_up_by_a_long_one(self, harness: BrokerHarness):
        """A13, C4, C14"""
        channel = harness.channel()
        long, short = harness.message(channel, after=600), harness.message(channel, after=1)
        harness.broker.schedule([long])
        harness.broker.schedule([short])
        harness.pass_time(harness.units(1))
        assert harness.ids_in(channel, 1) == [short.id]
        assert harness.broker.receive(channel) == []

    def test_each_message_keeps_its_own_time(self, harness: BrokerHarness):
        """A13: later calls do not overwrite earlier ones."""
        channel = harness.channel()
        messages = [harness.message(channel, after=after) for after in (3, 1, 2)]
        for message in messages:
            harness.broker.schedule([message])
        arrived = []
        for _ in range(3):
            harness.pass_time(harness.units(1))
            arrived += harness.ids_in(channel, 1)
        assert arrived == [messages[1].id, messages[2].id, messages[0].id]

    @pytest.mark.parametrize("delay", [0, -1, -3600])
    def test_a_delay_that_is_not_positive_goes_straight_to_the_channel(self, harness: BrokerHarness, delay: float):
        """A10, B58"""
        channel = harness.channel()
        message = compose_message(channel, b"now", deliver_after=delay, now=harness.broker.clock.now())
        [receipt] = harness.broker.schedule([message])
        assert receipt.outcome is Outcome.DISPATCHED
        assert [m.id for m in harness.see(channel, 1, limit=2)] == [message.id]

    def test_sending_ignores_the_due_time(self, harness: BrokerHarness):
        channel = harness.channel()
        message = harness.message(channel, after=600)
        [receipt] = harness.broker.send([message])
        assert receipt.outcome is Outcome.DISPATCHED
        [delivery] = harness.receive_even_if_early(channel, 1)
        assert delivery.message.id == message.id

    @pytest.mark.parametrize("payload", [b"", b"\x00\xff binary", bytes(100_000)], ids=["empty", "binary", "large"])
    def test_everything_the_user_gave_arrives_unchanged(self, harness: BrokerHarness, payload: bytes):
        """B7, B8, B31, B45"""
        channel = harness.channel()
        message = harness.message(
            channel,
            after=1,
            payload=payload,
            id=f"order 1/ä-{channel}",
            key="customer-ß",
            headers={"trace": "a1", "empty": "", "text": "grüße, 'quoted' \"twice\""},
            content_type="application/vnd.order+json; charset=utf-8",
            priority=7,
            origin=Origin(dag_id="bills", run_id="manual__2030-01-01", task_id="group.remind", map_index=3),
        )
        harness.broker.schedule([message])
        harness.pass_time(harness.units(1))
        [delivery] = harness.receive(channel, 1)
        assert delivery.message == message

    def test_messages_of_one_channel_and_key_arrive_in_due_order(self, harness: BrokerHarness):
        """B53, B62, B27, D17: no kind of consumer loses its order because of the delay."""
        channel = harness.channel()
        messages = [harness.message(channel, after=after, key="k") for after in (4, 1, 3, 2)]
        harness.broker.schedule(messages)
        harness.pass_time(harness.units(4))
        in_order = sorted(messages, key=lambda message: message.deliver_at)
        assert harness.ids_in(channel, 4) == [message.id for message in in_order]

    def test_a_message_that_is_due_at_once_does_not_overtake_an_earlier_one_of_its_key(self, harness: BrokerHarness):
        """B53"""
        channel = harness.channel()
        earlier = harness.message(channel, after=1, key="k")
        harness.broker.schedule([earlier])
        harness.pass_time(harness.units(1))
        harness.see(channel, 1, limit=1)
        later = harness.message(channel, after=0, key="k")
        harness.broker.schedule([later])
        assert harness.ids_in(channel, 2) == [earlier.id, later.id]

    def test_many_messages_in_one_call_all_arrive_once(self, harness: BrokerHarness):
        """B53, B59, D16"""
        channel = harness.channel()
        messages = [harness.message(channel, after=1 + n % 5 / 10) for n in range(500)]
        receipts = harness.broker.schedule(messages)
        assert [receipt.message_id for receipt in receipts] == [message.id for message in messages]
        harness.pass_time(harness.units(2))
        assert sorted(harness.ids_in(channel, 500)) == sorted(message.id for message in messages)
        assert harness.broker.receive(channel) == []

    def test_nothing_to_schedule_is_no_error(self, harness: BrokerHarness):
        assert harness.broker.schedule([]) == []
        assert harness.broker.send([]) == []

    def test_clients_that_schedule_at_once_do_not_disturb_each_other(self, harness: BrokerHarness):
        """A42, A29"""
        channel = harness.channel()
        batches = [[harness.message(channel, after=1) for _ in range(10)] for _ in range(6)]
        brokers = [harness.open() for _ in batches]
        results = run_together(
            [
                lambda broker=broker, batch=batch: broker.schedule(batch)
                for broker, batch in zip(brokers, batches, strict=True)
            ]
        )
        assert [result for result in results if isinstance(result, BaseException)] == []
        harness.pass_time(harness.units(1))
        assert sorted(harness.ids_in(channel, 60)) == sorted(message.id for batch in batches for message in batch)

    # -- refusals ------------------------------------------------------------------------------------------------

    def limited(self, harness: BrokerHarness) -> Broker:
        return harness.open(
            limits=Limits(min_delay=harness.units(5), max_delay=harness.units(10), max_payload_bytes=10)
        )

    @pytest.mark.parametrize(
        ("error", "after", "payload"),
        [
            (TooSoonError, 4, b""),
            (TooSoonError, -1, b""),
            (TooFarError, 20, b""),
            (PayloadError, 9, b"eleven byte"),
        ],
    )
    def test_beyond_the_limits_a_call_is_refused_and_nothing_is_written(
        self, harness: BrokerHarness, error: type[Exception], after: float, payload: bytes
    ):
        """A30, B4, B25"""
        channel = harness.channel()
        position, broker = harness.broker.journal_end(), self.limited(harness)
        allowed = harness.message(channel, after=9, payload=b"")
        refused = harness.message(channel, after=after, payload=payload)
        with pytest.raises(error, match="; "):
            broker.schedule([allowed, refused])
        self.assert_untouched(harness, position, [allowed, refused])

    def test_sending_checks_the_payload_but_not_the_delay(self, harness: BrokerHarness):
        channel = harness.channel()
        broker = self.limited(harness)
        broker.send([harness.message(channel, after=0, payload=b"")])
        with pytest.raises(PayloadError):
            broker.send([harness.message(channel, after=0, payload=b"eleven byte")])

    def test_an_id_given_twice_in_one_call_is_refused_and_nothing_is_written(self, harness: BrokerHarness):
        """A28"""
        channel = harness.channel()
        position = harness.broker.journal_end()
        one = harness.message(channel, after=1)
        other = harness.message(channel, after=2, id=one.id)
        for call in (harness.broker.schedule, harness.broker.send):
            with pytest.raises(InvalidMessageError, match=r"message_id: .* twice"):
                call([one, other])
        self.assert_untouched(harness, position, [one])

    def assert_untouched(self, harness: BrokerHarness, position: str, messages: list[Message]) -> None:
        ids = {message.id for message in messages}
        harness.dispatch()
        assert harness.broker.peek(messages[0].channel) == []
        assert not [e for e in harness.broker.read_journal(after=position) if e.message_id in ids]

    def test_the_check_describes_the_broker(self, harness: BrokerHarness):
        assert len(harness.broker.check()) > 10

    def test_a_closed_client_leaves_its_messages_behind(self, harness: BrokerHarness):
        """A41, A44"""
        channel = harness.channel()
        with harness.open() as broker:
            broker.schedule([message := harness.message(channel, after=1)])
        harness.pass_time(harness.units(1) + timedelta(milliseconds=1))
        assert harness.ids_in(channel, 1) == [message.id]
