from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.port import Broker
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.lifecycle import JOURNAL_PAGE_BYTES, Change, JournalEntry, size_of_entry
from airflow_delay_provider.domain.message import Message
from tests.contract.harness import BrokerHarness


class Tail:
    """Reads a journal on from where it stopped and remembers what concerns some messages."""

    def __init__(self, broker: Broker, *, page: int = 1000) -> None:
        self.broker = broker
        self.page = page
        self.position = broker.journal_end()
        self.entries: list[JournalEntry] = []

    def read(self) -> int:
        entries = self.broker.read_journal(after=self.position, limit=self.page)
        assert len(entries) <= self.page
        if entries:
            self.position = entries[-1].position
        self.entries += entries
        return len(entries)

    def of(self, messages: Iterable[Message]) -> list[JournalEntry]:
        ids = {message.id for message in messages}
        return [entry for entry in self.entries if entry.message_id in ids]

    def wait_for(self, harness: BrokerHarness, messages: list[Message], n: int) -> list[JournalEntry]:
        """Return the first ``n`` or more entries of these messages."""

        def complete() -> bool:
            while self.read():
                pass
            return len(self.of(messages)) >= n

        harness.wait_until(complete, f"{n} entries in the journal")
        return self.of(messages)


class JournalContract:
    """The journal records every change in order, and a reader misses nothing."""

    def test_a_message_that_arrives_leaves_two_entries(self, harness: BrokerHarness):
        """A45, B41, D11"""
        channel = harness.channel()
        tail = Tail(harness.broker)
        message = harness.message(channel, after=1)
        before = harness.broker.clock.now()
        harness.broker.schedule([message])
        harness.pass_time(harness.units(1))
        scheduled, dispatched = tail.wait_for(harness, [message], 2)
        assert [scheduled.change, dispatched.change] == [Change.SCHEDULED, Change.DISPATCHED]
        for entry in (scheduled, dispatched):
            assert (entry.message_id, entry.channel, entry.deliver_at) == (message.id, channel, message.deliver_at)
        assert -timedelta(milliseconds=1) < scheduled.at - before <= harness.on_time
        harness.assert_lateness(dispatched)

    def test_a_message_that_is_due_at_once_leaves_its_dispatch(self, harness: BrokerHarness):
        tail = Tail(harness.broker)
        message = harness.message(harness.channel(), after=-1)
        harness.broker.schedule([message])
        harness.wait_until(
            lambda: tail.wait_for(harness, [message], 1)[-1].change is Change.DISPATCHED, "the dispatch is recorded"
        )

    def test_every_change_of_a_waiting_message_is_recorded_in_order(self, harness: BrokerHarness):
        """A27, A45"""
        harness.needs("recall")
        harness.needs("knows_ids")
        channel = harness.channel()
        tail = Tail(harness.broker)
        message = harness.message(channel, after=600)
        harness.broker.schedule([message])
        replaced = harness.message(channel, after=500, id=message.id)
        harness.broker.schedule([replaced], on_conflict=OnConflict.REPLACE)
        later = replaced.deliver_at + harness.units(100)
        harness.broker.reschedule([message.id], later)
        harness.broker.expedite([message.id])
        harness.broker.cancel([message.id])
        entries = tail.wait_for(harness, [message], 5)
        assert [entry.change for entry in entries] == [
            Change.SCHEDULED,
            Change.RESCHEDULED,
            Change.RESCHEDULED,
            Change.EXPEDITED,
            Change.CANCELLED,
        ]
        assert [entry.deliver_at for entry in entries[:3]] == [message.deliver_at, replaced.deliver_at, later]
        assert entries[3].deliver_at <= harness.broker.clock.now()

    def test_requeues_and_dead_letters_are_recorded_with_their_reasons(self, harness: BrokerHarness):
        """A23, A25"""
        channel = harness.channel()
        message = harness.message(channel, after=0)
        tail = Tail(harness.broker)
        harness.broker.send([message])
        [delivery] = harness.receive(channel, 1)
        harness.broker.requeue(delivery, timedelta(0), reason="the service is down")
        [again] = harness.receive(channel, 1)
        harness.broker.dead_letter(again, channel=f"{channel}.dead", reason="given up")

        recorded: list[tuple[Change, str | None]] = []

        def all_recorded() -> bool:
            recorded[:] = [(entry.change, entry.reason) for entry in tail.wait_for(harness, [message], 3)]
            return recorded[-1][0] is Change.DEAD_LETTERED

        harness.wait_until(all_recorded, "the message is dead-lettered")
        interesting = [entry for entry in recorded if entry[0] in (Change.REQUEUED, Change.DEAD_LETTERED)]
        assert interesting == [
            (Change.REQUEUED, "the service is down"),
            (Change.DEAD_LETTERED, "given up"),
        ]

    def test_reading_goes_on_where_it_stopped_page_by_page(self, harness: BrokerHarness):
        """D11"""
        channel = harness.channel()
        tail = Tail(harness.broker, page=7)
        messages = [harness.message(channel, after=600) for _ in range(20)]
        harness.broker.schedule(messages)
        entries = tail.wait_for(harness, messages, 20)
        assert sorted(entry.message_id for entry in entries) == sorted(message.id for message in messages)
        assert len({entry.position for entry in entries}) == 20

    def test_a_page_of_large_messages_ends_before_its_limit(self, harness: BrokerHarness):
        """What reads a journal needs memory for a page, and 1 000 large messages would be gigabytes."""
        channel, large = harness.channel(), b"x" * 900_000
        tail = Tail(harness.broker)
        messages = [harness.message(channel, after=600, payload=large) for _ in range(40)]
        harness.broker.schedule(messages)
        pages: list[int] = []

        def complete() -> bool:
            while read := tail.read():
                pages.append(sum(map(size_of_entry, tail.entries[-read:])))
            return len(tail.of(messages)) >= len(messages)

        harness.wait_until(complete, "all are in the journal")
        assert sorted(entry.message_id for entry in tail.of(messages)) == sorted(message.id for message in messages)
        assert max(pages) < JOURNAL_PAGE_BYTES + len(large)

    def test_messages_scheduled_after_the_end_was_read_are_found_behind_it(self, harness: BrokerHarness):
        """D11: a task takes the position first, schedules, and waits from there."""
        channel = harness.channel()
        for _ in range(5):
            tail = Tail(harness.broker)
            message = harness.message(channel, after=600)
            harness.broker.schedule([message])
            assert len(tail.wait_for(harness, [message], 1)) == 1

    def test_a_reader_misses_nothing_while_many_write(self, harness: BrokerHarness):
        """D11, B32"""
        channel = harness.channel()
        writers = [harness.open() for _ in range(6)]
        batches = [
            [[harness.message(channel, after=600) for _ in range(1 + n % 3)] for n in range(12)] for _ in writers
        ]
        messages = [message for writer in batches for batch in writer for message in batch]
        tail = Tail(harness.broker, page=10)

        def write(broker: Broker, own: list[list[Message]]) -> None:
            for batch in own:
                broker.schedule(batch)

        with ThreadPoolExecutor(len(writers)) as pool:
            working = [pool.submit(write, broker, own) for broker, own in zip(writers, batches, strict=True)]
            while not all(future.done() for future in working):
                tail.read()
            for future in working:
                future.result()
        entries = tail.wait_for(harness, messages, len(messages))
        assert sorted(entry.message_id for entry in entries) == sorted(message.id for message in messages)

    # -- outcomes ------------------------------------------------------------------------------------------------

    def test_the_end_of_a_message_is_found_without_reading_on(self, harness: BrokerHarness):
        channel = harness.channel()
        since = harness.broker.journal_end()
        waits, arrives = harness.message(channel, after=600), harness.message(channel, after=1)
        harness.broker.schedule([waits, arrives])
        ids = [waits.id, arrives.id, "no-such-id"]
        outcomes = harness.broker.find_outcomes(ids, since=since)
        assert outcomes == {} or (list(outcomes) == [arrives.id] and harness.broker.clock.now() >= arrives.deliver_at)
        harness.pass_time(harness.units(1))
        harness.ids_in(channel, 1)
        harness.wait_until(lambda: bool(harness.broker.find_outcomes(ids, since=since)), "the outcome is found")
        [(message_id, entry)] = harness.broker.find_outcomes(ids, since=since).items()
        assert (message_id, entry.message_id, entry.change) == (arrives.id, arrives.id, Change.DISPATCHED)
        assert (entry.channel, entry.deliver_at) == (channel, arrives.deliver_at)
        harness.assert_lateness(entry)

    @pytest.mark.parametrize("afterwards", ["put back", "given up"])
    def test_a_dispatched_message_stays_dispatched_when_its_consumer_requeues_or_dead_letters_it(
        self, harness: BrokerHarness, afterwards: str
    ):
        """A18"""
        channel = harness.channel()
        since = harness.broker.journal_end()
        message = harness.message(channel, after=0)
        harness.broker.send([message])
        [delivery] = harness.receive(channel, 1)
        if afterwards == "put back":
            harness.broker.requeue(delivery, harness.units(600))
        else:
            harness.broker.dead_letter(delivery, channel=f"{channel}.dead", reason="bad")

        def found() -> bool:
            outcomes = harness.broker.find_outcomes([message.id], since=since)
            return message.id in outcomes and outcomes[message.id].change is Change.DISPATCHED

        harness.wait_until(found, "the message is known as dispatched")

    def test_a_cancelled_message_is_found_as_cancelled(self, harness: BrokerHarness):
        harness.needs("recall")
        since = harness.broker.journal_end()
        message = harness.message(harness.channel(), after=600)
        harness.broker.schedule([message])
        harness.broker.cancel([message.id])
        outcomes = harness.broker.find_outcomes([message.id], since=since)
        assert outcomes[message.id].change is Change.CANCELLED

    def test_of_no_messages_nothing_is_found(self, harness: BrokerHarness):
        assert harness.broker.find_outcomes([], since=harness.broker.journal_end()) == {}
