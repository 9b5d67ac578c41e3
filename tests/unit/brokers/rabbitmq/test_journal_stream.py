"""Which records of a dispatch are announced, and when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from airflow_delay_provider.brokers.rabbitmq.journal_stream import LOOK_AHEAD, PARKED_SECONDS, EntryBuffer, PendingEntry
from airflow_delay_provider.domain.lifecycle import JOURNAL_PAGE_BYTES, Change, JournalEntry
from airflow_delay_provider.domain.message import Message

NOW = datetime(2030, 1, 1, tzinfo=UTC)
D, P, R, S = Change.DISPATCHED, Change.PARKED, Change.REQUEUED, Change.SCHEDULED


@dataclass
class Watch:
    seconds: float = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def buffer(watch: Watch) -> EntryBuffer:
    return EntryBuffer(watch)


def pending(change: Change, name: str = "m1", *, may_be_in_relay: bool = True, size: int = 0) -> PendingEntry:
    entry = JournalEntry(
        message_id=name,
        change=change,
        at=NOW,
        channel="orders",
        deliver_at=NOW,
        position="0.0",
        message=Message(id=name, channel="orders", payload=b"x" * size, deliver_at=NOW) if size else None,
    )
    return PendingEntry(entry=entry, may_be_in_relay=may_be_in_relay)


def released(buffer: EntryBuffer, limit: int = 10_000) -> list[tuple[Change, str]]:
    return [(each.entry.change, each.entry.message_id) for each in buffer.release(limit)]


def test_a_dispatch_is_held_back_for_a_moment_and_so_are_later_entries(buffer: EntryBuffer, watch: Watch) -> None:
    for each in (pending(S), pending(D), pending(S, "m2")):
        buffer.add(each)
    assert released(buffer) == [(S, "m1")]
    watch.seconds += PARKED_SECONDS
    assert released(buffer) == [(D, "m1"), (S, "m2")]
    assert released(buffer) == []


@pytest.mark.parametrize("order", [(D, P), (P, D)], ids=["as on a quorum ladder", "as may be on a classic one"])
def test_a_dispatch_of_a_message_that_was_parked_is_never_announced(
    buffer: EntryBuffer, watch: Watch, order: tuple[Change, Change]
) -> None:
    for change in order:
        buffer.add(pending(change))
    watch.seconds += PARKED_SECONDS
    assert released(buffer) == [(P, "m1")]


def test_a_parked_message_that_was_replayed_is_dispatched(buffer: EntryBuffer, watch: Watch) -> None:
    for change in (P, R, D):
        buffer.add(pending(change))
    watch.seconds += PARKED_SECONDS
    assert released(buffer) == [(P, "m1"), (R, "m1"), (D, "m1")]


def test_a_parked_message_that_is_sent_again_without_a_delay_is_dispatched(buffer: EntryBuffer, watch: Watch) -> None:
    buffer.add(pending(P))
    buffer.add(pending(D, may_be_in_relay=False))
    watch.seconds += PARKED_SECONDS
    assert released(buffer) == [(P, "m1"), (D, "m1")]


def test_of_two_dispatches_the_later_one_was_parked(buffer: EntryBuffer, watch: Watch) -> None:
    for change in (D, D, P):
        buffer.add(pending(change))
    watch.seconds += PARKED_SECONDS
    assert released(buffer) == [(D, "m1"), (P, "m1")]


def test_a_dispatch_with_many_records_behind_it_is_not_held_back(buffer: EntryBuffer) -> None:
    for n in range(LOOK_AHEAD + 3):
        buffer.add(pending(D, f"m{n}"))
    assert released(buffer) == [(D, "m0"), (D, "m1"), (D, "m2")]


def test_no_more_is_released_than_asked_for(buffer: EntryBuffer) -> None:
    for n in range(3):
        buffer.add(pending(S, f"m{n}"))
    assert released(buffer, 2) == [(S, "m0"), (S, "m1")]
    assert released(buffer, 2) == [(S, "m2")]


def test_large_messages_leave_no_room_until_they_are_released(buffer: EntryBuffer) -> None:
    for n in range(4):
        assert buffer.has_room(1000)
        buffer.add(pending(S, f"m{n}", size=JOURNAL_PAGE_BYTES // 2))
    assert not buffer.has_room(1000)
    assert released(buffer) == [(S, "m0"), (S, "m1")]
    assert buffer.has_room(1000)
    assert not buffer.has_room(2)
