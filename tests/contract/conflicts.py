from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from airflow_delay_provider.brokers.port import Outcome, Receipt
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.exceptions import ConflictError
from tests.contract.harness import BrokerHarness, run_together

WRITERS = 8


class ConflictContract:
    """The same id again: kept, refused or replaced, and never by check-then-act."""

    @pytest.fixture(autouse=True)
    def _knows_ids(self, harness: BrokerHarness) -> None:
        harness.needs("knows_ids")

    def test_keep_is_success_and_changes_nothing(self, harness: BrokerHarness):
        """A28, B6: a task that is tried again schedules once."""
        channel = harness.channel()
        first = harness.message(channel, after=1, payload=b"first")
        harness.broker.schedule([first])
        [receipt] = harness.broker.schedule([replace(first, payload=b"second")], on_conflict=OnConflict.KEEP)
        assert receipt.outcome is Outcome.KEPT
        harness.pass_time(harness.units(1))
        assert [d.message.payload for d in harness.receive(channel, 1)] == [b"first"]
        assert harness.broker.receive(channel) == []

    def test_keep_holds_after_the_message_was_handled(self, harness: BrokerHarness):
        """A28, B61"""
        channel = harness.channel()
        message = harness.message(channel, after=0)
        harness.broker.send([message])
        harness.ids_in(channel, 1)
        assert [r.outcome for r in harness.broker.schedule([message])] == [Outcome.KEPT]
        assert [r.outcome for r in harness.broker.send([message])] == [Outcome.KEPT]
        harness.dispatch()
        assert harness.broker.receive(channel) == []

    def test_fail_refuses_and_names_the_id_and_what_to_do(self, harness: BrokerHarness):
        """A28, B5"""
        channel = harness.channel()
        message = harness.message(channel, after=1)
        harness.broker.schedule([message], on_conflict=OnConflict.FAIL)
        with pytest.raises(
            ConflictError, match=rf"{message.id}.* already exists .*; use another message_id"
        ) as refused:
            harness.broker.schedule([message], on_conflict=OnConflict.FAIL)
        assert refused.value.message_id == message.id

    def test_replace_takes_the_new_content_and_time(self, harness: BrokerHarness):
        """A28, B59"""
        channel = harness.channel()
        first = harness.message(channel, after=600, payload=b"first", headers={"a": "1"}, key="k")
        new = harness.message(channel, after=1, id=first.id, payload=b"second", headers={"b": "2"}, priority=3)
        harness.broker.schedule([first])
        [receipt] = harness.broker.schedule([new], on_conflict=OnConflict.REPLACE)
        assert receipt.outcome is Outcome.REPLACED
        harness.pass_time(harness.units(1))
        assert [d.message for d in harness.receive(channel, 1)] == [new]

    def test_replace_of_an_unknown_id_schedules_it(self, harness: BrokerHarness):
        channel = harness.channel()
        [receipt] = harness.broker.schedule([harness.message(channel, after=600)], on_conflict=OnConflict.REPLACE)
        assert receipt.outcome is Outcome.SCHEDULED

    def test_replace_with_a_time_that_has_come_dispatches_at_once(self, harness: BrokerHarness):
        """A10"""
        channel = harness.channel()
        message = harness.message(channel, after=600)
        harness.broker.schedule([message])
        [receipt] = harness.broker.schedule(
            [harness.message(channel, after=-1, id=message.id, payload=b"new")], on_conflict=OnConflict.REPLACE
        )
        assert receipt.outcome is Outcome.DISPATCHED
        assert [m.payload for m in harness.see(channel, 1, limit=2)] == [b"new"]

    @pytest.mark.parametrize("ending", ["dispatched", "cancelled"])
    def test_replace_of_a_message_that_waits_no_longer_is_refused(self, harness: BrokerHarness, ending: str):
        """A28, B5"""
        channel = harness.channel()
        message = harness.message(channel, after=1)
        harness.broker.schedule([message])
        if ending == "dispatched":
            harness.pass_time(harness.units(1))
            harness.ids_in(channel, 1)
        else:
            harness.needs("recall")
            harness.broker.cancel([message.id])
        with pytest.raises(ConflictError, match=rf"{message.id}.*{ending.upper()}.*use another message_id"):
            harness.broker.schedule([message], on_conflict=OnConflict.REPLACE)

    @pytest.mark.parametrize("policy", OnConflict)
    def test_the_same_id_in_another_channel_is_refused_by_every_policy(
        self, harness: BrokerHarness, policy: OnConflict
    ):
        """B6"""
        here, there = harness.channel(), harness.channel()
        message = harness.message(here, after=1)
        harness.broker.schedule([message])
        with pytest.raises(ConflictError, match=rf"already exists in channel '{here}', not in '{there}'"):
            harness.broker.schedule([replace(message, channel=there)], on_conflict=policy)
        harness.pass_time(harness.units(1))
        assert harness.ids_in(here, 1) == [message.id]
        assert harness.broker.receive(there) == []

    @pytest.mark.parametrize("policy", [OnConflict.FAIL, OnConflict.REPLACE])
    def test_one_refused_message_leaves_none_of_its_batch(self, harness: BrokerHarness, policy: OnConflict):
        """A29"""
        channel = harness.channel()
        taken = harness.message(channel, after=0)
        harness.broker.send([taken])
        position = harness.broker.journal_end()
        fresh = [harness.message(channel, after=after) for after in (0, 1)]
        with pytest.raises(ConflictError):
            harness.broker.schedule([fresh[0], taken, fresh[1]], on_conflict=policy)
        harness.pass_time(harness.units(1))
        assert harness.ids_in(channel, 1) == [taken.id]
        assert harness.broker.receive(channel) == []
        # The journal may still show earlier changes of the taken id: its end is before any open transaction.
        mine = {message.id for message in fresh}
        assert not [entry for entry in harness.broker.read_journal(after=position) if entry.message_id in mine]
        assert {r.outcome for r in harness.broker.schedule(fresh)} == {Outcome.DISPATCHED}

    @pytest.mark.parametrize("policy", OnConflict)
    def test_of_many_writers_with_one_id_exactly_one_wins(self, harness: BrokerHarness, policy: OnConflict):
        """A28, A29, B5, B6, B33"""
        channel = harness.channel()
        template = harness.message(channel, after=1)
        versions = [replace(template, payload=f"version {n}".encode()) for n in range(WRITERS)]
        brokers = [harness.open() for _ in versions]
        results = run_together(
            [
                lambda broker=broker, version=version: broker.schedule([version], on_conflict=policy)
                for broker, version in zip(brokers, versions, strict=True)
            ]
        )
        losers = {OnConflict.KEEP: Outcome.KEPT, OnConflict.REPLACE: Outcome.REPLACED, OnConflict.FAIL: ConflictError}
        assert Counter(map(_outcome, results)) == {Outcome.SCHEDULED: 1, losers[policy]: WRITERS - 1}
        harness.pass_time(harness.units(1))
        [delivery] = harness.receive(channel, 1)
        if policy is not OnConflict.REPLACE:
            winner = [_outcome(result) for result in results].index(Outcome.SCHEDULED)
            assert delivery.message == versions[winner]
        assert harness.broker.receive(channel) == []

    def test_writers_of_overlapping_batches_all_succeed(self, harness: BrokerHarness):
        """A29, B35: also when they meet the shared ids in opposite order."""
        channel = harness.channel()
        messages = [harness.message(channel, after=1) for _ in range(30)]
        batches = [messages, messages[::-1], messages]
        brokers = [harness.open() for _ in batches]
        results = run_together(
            [
                lambda broker=broker, batch=batch: broker.schedule(batch)
                for broker, batch in zip(brokers, batches, strict=True)
            ]
        )
        assert [result for result in results if isinstance(result, BaseException)] == []
        outcomes = Counter(receipt.outcome for result in results for receipt in _receipts(result))
        assert outcomes == {Outcome.SCHEDULED: 30, Outcome.KEPT: 60}
        harness.pass_time(harness.units(1))
        assert sorted(harness.ids_in(channel, 30)) == sorted(message.id for message in messages)


def _receipts(result: list[Receipt] | BaseException) -> list[Receipt]:
    assert not isinstance(result, BaseException)
    return result


def _outcome(result: list[Receipt] | BaseException) -> Outcome | type[BaseException]:
    if isinstance(result, BaseException):
        return type(result)
    [receipt] = result
    return receipt.outcome
