"""A model check of the heart of the ladder: what a partition writes and commits, whatever happens in between.

The partition, its progress and the wire are the real ones; Kafka and time are simulated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka import progress, wire
from airflow_delay_provider.brokers.kafka.dispatch import partition
from airflow_delay_provider.brokers.kafka.dispatch.partition import Partition
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import PartitionQueue
from airflow_delay_provider.brokers.kafka.progress import Progress
from airflow_delay_provider.domain.lifecycle import Change
from tests.unit.brokers.kafka.bench import Bench
from tests.unit.brokers.kafka.model import MAX_NOTE, Dispatcher, Transaction
from tests.unit.brokers.kafka.model_run import RandomRun
from tests.unit.brokers.kafka.model_verdict import find_violations

RUNS = 100
HOUR_MS = 3_600_000


def play(random: Random, *, steps: int = 60, skew_ms: int = 0) -> RandomRun:
    run = RandomRun(random, skew_ms=skew_ms)
    run.play(steps)
    run.finish()
    return run


def first_violation(seeds: range, **options: Any) -> str | None:
    for seed in seeds:
        if wrong := find_violations(play(Random(seed), **options)):
            return f"seed {seed}: " + "\n".join(wrong)
    return None


@pytest.mark.parametrize("block", range(20))
def test_each_message_is_delivered_once_and_never_early_after_any_failures(block: int) -> None:
    """D11, E3, E7, E12: through crashes, rebalances, zombies, outages and recalls."""
    assert first_violation(range(block * RUNS, (block + 1) * RUNS)) is None


@given(st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_a_life_that_breaks_a_promise_would_be_shrunk_to_a_short_one(random: Random) -> None:
    """E12"""
    assert find_violations(play(random)) == []


@pytest.mark.parametrize("block", range(4))
def test_long_lives_keep_all_promises_too(block: int) -> None:
    """E12"""
    assert first_violation(range(block * RUNS, block * RUNS + 20), steps=300) is None


@pytest.mark.parametrize("skew_ms", [-30 * 24 * HOUR_MS, -HOUR_MS, -3_000, -80, 80, 3_000, HOUR_MS])
def test_all_promises_hold_when_the_clocks_of_broker_and_dispatcher_differ(skew_ms: int) -> None:
    """E3, E12: one that runs behind must not make messages run in circles."""
    assert first_violation(range(RUNS // 2), skew_ms=skew_ms) is None


@pytest.mark.parametrize(
    ("held", "open_records", "span"), [(1, 700, 24_000), (3, 2, 8), (50_000, 1, 1), (50_000, 3, 20)]
)
def test_all_promises_hold_when_there_is_hardly_any_room(
    monkeypatch: pytest.MonkeyPatch, held: int, open_records: int, span: int
) -> None:
    """D6: what does not fit into memory or notes waits in its topic."""
    monkeypatch.setattr(partition, "MAX_DUE_SOON", held)
    monkeypatch.setattr(progress, "FEW_OPEN", open_records)
    monkeypatch.setattr(progress, "SHORT_SPAN", span)
    assert first_violation(range(RUNS // 2)) is None


@pytest.mark.parametrize(("held", "unknown"), [(1, 1), (1_000, 400)])
def test_all_promises_hold_when_hardly_any_bytes_may_be_held(
    monkeypatch: pytest.MonkeyPatch, held: int, unknown: int
) -> None:
    """D6"""
    monkeypatch.setattr(partition, "MAX_DUE_SOON_BYTES", held)
    monkeypatch.setattr(partition, "MANY_UNKNOWN_BYTES", unknown)
    assert first_violation(range(RUNS // 2)) is None


def test_in_a_crowd_notes_fit_and_nothing_is_lost_or_doubled_by_a_crash() -> None:
    """D6, D11, E12"""
    bench, random = Bench(), Random(1)
    delays_ms = {f"m{number}": random.randrange(2_400) for number in range(6_000)}
    for message_id, delay_ms in delays_ms.items():
        bench.schedule(message_id, delay_ms)
        bench.kafka.logs[bench.topology.inbox].skip(random.choice((0, 0, 1, 30)))
    for crash_ms in (500, 1_000, 1_500, 2_000):
        bench.pass_to(crash_ms)
        bench.restart()
    bench.pass_to(5_000)
    assert sorted(message_id for message_id, _ in bench.delivered) == sorted(delays_ms)
    assert all(at_ms >= delays_ms[message_id] for message_id, at_ms in bench.delivered)
    assert MAX_NOTE // 2 < bench.kafka.longest_note <= MAX_NOTE


def test_the_random_lives_contain_everything_that_can_happen() -> None:
    """Otherwise they would prove nothing."""
    seen: set[str] = set()
    for seed in range(RUNS):
        run = play(Random(seed))
        places = {command.id: command.position.topic for command in run.commands}
        for encoded in run.kafka.journal:
            if (result := encoded.result) is not None:
                topic = places[result.command_id]
                where = "rung" if ".rung." in topic else topic.rpartition(".")[2]
                seen.add(f"{where} {'accepted' if result.accepted else 'refused'}")
            else:
                assert encoded.change is not None
                seen.add(encoded.change.value)
        seen |= {"note"} if run.kafka.longest_note else set()
        seen |= {"cascade"} if any(rests > 2 for rests in run.kafka.rests.values()) else set()
    answers = {f"{where} {how}" for where in ("inbox", "control", "rung") for how in ("accepted", "refused")}
    elsewhere = {Change.REQUEUED, Change.REFUSED, Change.PARKED}
    recorded = {change.value for change in Change if change not in elsewhere}
    assert seen == answers | recorded | {"note", "cascade"}


# -- the model can fail --------------------------------------------------------------------------------------------


def forget_notes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "note", lambda _self: "")


def commit_past_open_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "low", property(lambda self: self.next))
    patch.setattr(Progress, "note", lambda _self: "")


def forget_what_was_said(patch: pytest.MonkeyPatch) -> None:
    for name in ("_accept", "_execute"):
        patch.setattr(Partition, name, _never_again(getattr(Partition, name)))


def _never_again(step: Callable[..., None]) -> Callable[..., None]:
    @wraps(step)
    def as_first_time(*arguments: Any, again: bool) -> None:
        step(*arguments, again=False)

    return as_first_time


def forget_recalls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transaction, "record_recall", lambda *_arguments, **_options: None)


def believe_that_everything_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionQueue, "is_waiting", lambda _self, _offset: True)


def refuse_everything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionQueue, "is_waiting", lambda _self, _offset: False)


def let_zombies_commit(patch: pytest.MonkeyPatch) -> None:
    commit = Dispatcher.commit

    def unfenced(self: Dispatcher) -> bool:
        self.generation = self._kafka.generation
        return commit(self)

    patch.setattr(Dispatcher, "commit", unfenced)


def show_what_is_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transaction, "abort", lambda self: self.commit([]))


def hurry_by_a_second(patch: pytest.MonkeyPatch) -> None:
    held_until_ms = wire.held_until_ms
    patch.setattr(wire, "held_until_ms", lambda key: held_until_ms(key) - 1000)


def append_again_and_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionQueue, "ready_ms", lambda _self, _record: 0)


@pytest.mark.parametrize(
    ("mutate", "violation"),
    [
        (forget_notes, "delivered 2 times|the journal disagrees"),
        (commit_past_open_records, "delivered 0 times"),
        (forget_what_was_said, "the journal disagrees|answered once"),
        (forget_recalls, "delivered [12] times|the journal disagrees"),
        (believe_that_everything_waits, "delivered [12] times|the journal disagrees|are not forgotten"),
        (refuse_everything, "refused, although the message is there"),
        (let_zombies_commit, "delivered [02] times|the journal disagrees|answered once|dead-lettered"),
        (show_what_is_aborted, "delivered 2 times|the journal disagrees|answered once|dead-lettered"),
        (hurry_by_a_second, "ms early"),
        (append_again_and_again, "rested [0-9]+ times|never comes to an end"),
    ],
)
def test_an_algorithm_with_a_mistake_is_found_out(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], violation: str
) -> None:
    """D21, E3: otherwise a model that finds nothing would say nothing."""
    mutate(monkeypatch)
    assert re.search(violation, first_violation(range(RUNS)) or "nothing is wrong")
