"""Which records of a dispatch are announced, and when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from airflow_delay_provider.brokers.rabbitmq.dispatches import LOOK_AHEAD, PARKED_SECONDS, Dispatches, Told
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change

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
def dispatches(watch: Watch) -> Dispatches:
    return Dispatches(watch)


def told(change: Change, name: str = "m1", *, may_be_held: bool = True) -> Told:
    entry = JournalEntry(message_id=name, change=change, at=NOW, channel="orders", deliver_at=NOW, position="0.0")
    return Told(entry=entry, may_be_held=may_be_held)


def released(dispatches: Dispatches, limit: int = 10_000) -> list[tuple[Change, str]]:
    return [(each.entry.change, each.entry.message_id) for each in dispatches.release(limit)]


def test_a_dispatch_is_held_back_for_a_moment_and_so_is_what_follows(dispatches: Dispatches, watch: Watch) -> None:
    for each in (told(S), told(D), told(S, "m2")):
        dispatches.add(each)
    assert released(dispatches) == [(S, "m1")]
    watch.seconds += PARKED_SECONDS
    assert released(dispatches) == [(D, "m1"), (S, "m2")]
    assert released(dispatches) == []


@pytest.mark.parametrize("order", [(D, P), (P, D)], ids=["as on a quorum ladder", "as may be on a classic one"])
def test_a_dispatch_of_a_message_that_was_parked_is_never_announced(
    dispatches: Dispatches, watch: Watch, order: tuple[Change, Change]
) -> None:
    for change in order:
        dispatches.add(told(change))
    watch.seconds += PARKED_SECONDS
    assert released(dispatches) == [(P, "m1")]


def test_a_parked_message_that_was_replayed_is_dispatched(dispatches: Dispatches, watch: Watch) -> None:
    for change in (P, R, D):
        dispatches.add(told(change))
    watch.seconds += PARKED_SECONDS
    assert released(dispatches) == [(P, "m1"), (R, "m1"), (D, "m1")]


def test_a_parked_message_that_is_sent_again_without_a_delay_is_dispatched(
    dispatches: Dispatches, watch: Watch
) -> None:
    dispatches.add(told(P))
    dispatches.add(told(D, may_be_held=False))
    watch.seconds += PARKED_SECONDS
    assert released(dispatches) == [(P, "m1"), (D, "m1")]


def test_of_two_dispatches_the_later_one_was_parked(dispatches: Dispatches, watch: Watch) -> None:
    for change in (D, D, P):
        dispatches.add(told(change))
    watch.seconds += PARKED_SECONDS
    assert released(dispatches) == [(D, "m1"), (P, "m1")]


def test_one_who_reads_back_waits_for_no_dispatch_with_many_records_behind_it(dispatches: Dispatches) -> None:
    for n in range(LOOK_AHEAD + 3):
        dispatches.add(told(D, f"m{n}"))
    assert released(dispatches) == [(D, "m0"), (D, "m1"), (D, "m2")]


def test_no_more_is_released_than_asked_for(dispatches: Dispatches) -> None:
    for n in range(3):
        dispatches.add(told(S, f"m{n}"))
    assert released(dispatches, 2) == [(S, "m0"), (S, "m1")]
    assert released(dispatches, 2) == [(S, "m2")]
