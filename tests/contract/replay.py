"""Dead letters can be replayed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.dead_letters import DeadLetters
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change
from airflow_delay_provider.domain.message import Message, Origin
from tests.contract.harness import BrokerHarness


class ReplayContract:
    """What a replay does with dead letters, and with everything else."""

    def given_up(
        self, harness: BrokerHarness, channel: str, *reasons: str, origin: Origin | None = None
    ) -> list[Message]:
        """Messages that a consumer has dead-lettered for these reasons."""
        messages = [
            harness.message(channel, after=0, headers={"n": str(n)}, origin=origin) for n in range(len(reasons))
        ]
        harness.broker.send(messages)
        deliveries = {each.message.id: each for each in harness.receive(channel, len(messages))}
        for message, reason in zip(messages, reasons, strict=True):
            harness.broker.dead_letter(deliveries[message.id], channel=f"{channel}.dead", reason=reason)
        return messages

    def test_a_channel_is_replayed_as_a_whole(self, harness: BrokerHarness):
        """A25: content and id are the same, and they start with a count of none."""
        channel = harness.channel()
        dead = self.given_up(harness, channel, "bad", "worse", "worst")
        selection = DeadLetters(channel=channel)
        harness.wait_until(lambda: harness.broker.count_dead(selection).count == 3, "three dead letters")
        done = harness.broker.replay(selection)
        assert (done.count, done.missing, done.is_complete) == (3, (), True)
        again = {each.message.id: each.message for each in harness.receive(channel, 3)}
        assert {each.id: (each.payload, each.headers) for each in dead} == {
            each.id: (each.payload, each.headers) for each in again.values()
        }
        assert {each.handled_count for each in again.values()} == {0}
        assert harness.broker.receive(f"{channel}.dead") == []
        assert harness.broker.replay(selection).count == 0

    def test_only_messages_that_the_filter_includes_are_replayed(self, harness: BrokerHarness):
        """A25"""
        channel = harness.channel()
        first, second, third = self.given_up(harness, channel, "TimeoutError: db", "KeyError: 'a'", "KeyError: 'b'")
        harness.wait_until(lambda: harness.broker.count_dead(DeadLetters(channel=channel)).count == 3, "dead letters")
        counted = harness.broker.count_dead(DeadLetters(channel=channel, reason="KeyError"))
        assert counted.count == 2 if counted.is_exact else counted.count >= 2
        assert harness.broker.replay(DeadLetters(channel=channel, reason="KeyError")).count == 2
        assert set(harness.ids_in(channel, 2)) == {second.id, third.id}
        assert [each.message.id for each in harness.dead_letters(channel)] == [first.id]

    def test_messages_of_a_task_and_of_a_time_are_found(self, harness: BrokerHarness):
        """A25"""
        channel = harness.channel()
        mine = Origin(dag_id="mine", run_id="r", task_id="t")
        [message] = self.given_up(harness, channel, "bad", origin=mine)
        self.given_up(harness, channel, "bad", origin=Origin(dag_id="theirs", run_id="r", task_id="t"))
        harness.wait_until(lambda: harness.broker.count_dead(DeadLetters(channel=channel)).count == 2, "dead letters")
        now = harness.broker.clock.now()
        for selection in (
            DeadLetters(channel=channel, dag_id="mine", task_id="another"),
            DeadLetters(channel=channel, dag_id="mine", since=now + timedelta(hours=1)),
            DeadLetters(channel=channel, dag_id="mine", until=now - timedelta(hours=1)),
        ):
            assert harness.broker.replay(selection).count == 0
        hour = DeadLetters(
            channel=channel, dag_id="mine", since=now - timedelta(hours=1), until=now + timedelta(hours=1)
        )
        assert harness.broker.replay(hour).count == 1
        assert harness.ids_in(channel, 1) == [message.id]

    def test_messages_are_replayed_by_id_and_an_id_that_is_not_dead_is_named(self, harness: BrokerHarness):
        """A25"""
        channel = harness.channel()
        first, second = self.given_up(harness, channel, "bad", "bad")
        harness.wait_until(lambda: harness.broker.count_dead(DeadLetters(channel=channel)).count == 2, "dead letters")
        done = harness.broker.replay(DeadLetters(channel=channel, message_ids=(second.id, "nobody")))
        assert (done.count, done.missing) == (1, ("nobody",))
        assert harness.ids_in(channel, 1) == [second.id]
        assert [each.message.id for each in harness.dead_letters(channel)] == [first.id]

    def test_a_channel_without_dead_letters_has_nothing_to_replay(self, harness: BrokerHarness):
        channel = harness.channel()
        harness.broker.schedule([harness.message(channel, after=600)])
        selection = DeadLetters(channel=channel)
        assert harness.broker.count_dead(selection).count == 0
        assert harness.broker.replay(selection).count == 0

    def test_the_journal_records_the_replay_and_the_dispatch(self, harness: BrokerHarness):
        """A24, A25"""
        channel = harness.channel()
        [message] = self.given_up(harness, channel, "bad")
        harness.wait_until(lambda: harness.broker.count_dead(DeadLetters(channel=channel)).count == 1, "a dead letter")
        position = harness.broker.journal_end()
        harness.broker.replay(DeadLetters(channel=channel))
        harness.ids_in(channel, 1)

        def is_recorded() -> bool:
            entries = harness.broker.read_journal(after=position)
            changes = [entry.change for entry in entries if entry.message_id == message.id]
            return changes[-2:] == [Change.REQUEUED, Change.DISPATCHED]

        harness.wait_until(is_recorded, "the journal has it")

    def test_a_dead_message_is_scheduled_again_by_the_same_id(self, harness: BrokerHarness):
        """A24, A28: a cleared task sends dead messages again; waiting and dispatched ones are kept."""
        harness.needs("knows_ids")
        channel = harness.channel()
        [dead] = self.given_up(harness, channel, "bad")
        again = harness.message(channel, after=1, id=dead.id, payload=b"again")
        [receipt] = harness.broker.schedule([again])
        assert receipt.outcome == "scheduled"
        assert harness.broker.find_outcomes([dead.id], since=FROM_THE_START) == {}
        [receipt] = harness.broker.schedule([again])
        assert receipt.outcome == "kept"
        harness.pass_time(harness.units(1))
        [delivery] = harness.receive(channel, 1)
        assert (delivery.message.id, delivery.message.payload, delivery.message.handled_count) == (dead.id, b"again", 0)
        [receipt] = harness.broker.schedule([again])
        assert receipt.outcome == "kept"

    @pytest.mark.parametrize("policy", ["keep", "replace"])
    def test_a_dead_message_that_is_scheduled_again_for_now_is_dispatched(self, harness: BrokerHarness, policy: str):
        """A10, A28"""
        harness.needs("knows_ids")
        channel = harness.channel()
        [dead] = self.given_up(harness, channel, "bad")
        again = harness.message(channel, after=0, id=dead.id)
        [receipt] = harness.broker.schedule([again], on_conflict=OnConflict(policy))
        assert receipt.outcome == "dispatched"
        assert harness.ids_in(channel, 1) == [dead.id]
