from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from threading import Barrier
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_delay_provider.ledger import gates
from airflow_delay_provider.ledger.database import Ledger
from airflow_delay_provider.ledger.gates import Outage
from tests.unit.ledger import rows

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)
CLUSTER = "spark://10.0.0.1:7077"


def take(
    ledger: Ledger,
    n: int,
    *,
    now: datetime = NOW,
    every: timedelta = SECOND,
    burst: int = 3,
    cluster: str = CLUSTER,
) -> list[datetime]:
    return ledger.transact(lambda c: gates.take_turns(c, cluster, n, now=now, every=every, burst=burst))


def find(ledger: Ledger, cluster: str = CLUSTER) -> Outage | None:
    return rows.read(ledger, lambda c: gates.find_outage(c, cluster))


def note_down(ledger: Ledger, known: Outage | None, *, now: datetime = NOW, pause: timedelta = 10 * SECOND) -> None:
    ledger.transact(lambda c: gates.note_down(c, CLUSTER, known=known, now=now, pause=pause))


def note_up(ledger: Ledger) -> None:
    ledger.transact(lambda c: gates.note_up(c, CLUSTER))


# -- turns


def test_a_full_bucket_gives_its_burst_at_once_and_then_one_turn_each_step(ledger: Ledger):
    assert take(ledger, 6) == [NOW, NOW, NOW, NOW + SECOND, NOW + 2 * SECOND, NOW + 3 * SECOND]


def test_who_asks_one_by_one_gets_the_same_turns_as_who_asks_for_all(ledger: Ledger):
    one_by_one = [turn for _ in range(6) for turn in take(ledger, 1)]
    assert one_by_one == take(ledger, 6, cluster="another")


def test_a_bucket_that_was_left_alone_is_full_again_and_no_fuller(ledger: Ledger):
    take(ledger, 6)
    later = NOW + 6 * SECOND
    assert take(ledger, 4, now=later) == [later, later, later, later + SECOND]
    much_later = NOW + timedelta(days=30)
    assert take(ledger, 4, now=much_later) == [much_later, much_later, much_later, much_later + SECOND]


def test_a_bucket_that_was_left_alone_for_a_step_has_one_turn_more(ledger: Ledger):
    take(ledger, 3)
    assert take(ledger, 2, now=NOW + SECOND) == [NOW + SECOND, NOW + 2 * SECOND]


def test_clusters_have_buckets_of_their_own(ledger: Ledger):
    take(ledger, 10)
    assert take(ledger, 1, cluster="another") == [NOW]


def test_without_a_burst_turns_are_a_step_apart(ledger: Ledger):
    assert take(ledger, 3, burst=1) == [NOW, NOW + SECOND, NOW + 2 * SECOND]


def test_nobody_who_asks_gets_no_turn(ledger: Ledger):
    assert take(ledger, 0) == []
    assert take(ledger, 1) == [NOW]


def test_a_rate_that_is_no_whole_number_of_milliseconds_is_not_exceeded(ledger: Ledger):
    turns = take(ledger, 3001, every=SECOND / 3, burst=1)
    assert turns[-1] - turns[0] >= 1000 * SECOND


def test_an_outage_changes_nobodys_turn(ledger: Ledger):
    take(ledger, 4)
    note_down(ledger, None)
    note_up(ledger)
    assert take(ledger, 1) == [NOW + 2 * SECOND]


#: Moments at which tasks ask, as milliseconds after the one before, and for how many turns.
ARRIVALS = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 8)), min_size=1, max_size=12)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(arrivals=ARRIVALS, every_ms=st.integers(1, 1500), burst=st.integers(1, 5))
def test_in_no_span_of_time_are_there_more_turns_than_the_burst_and_one_each_step(
    ledger: Ledger, arrivals: list[tuple[int, int]], every_ms: int, burst: int
):
    every, cluster, now = timedelta(milliseconds=every_ms), uuid4().hex, NOW
    turns: list[datetime] = []
    for pause_ms, n in arrivals:
        now += timedelta(milliseconds=pause_ms)
        given_now = take(ledger, n, now=now, every=every, burst=burst, cluster=cluster)
        assert min(given_now) >= now
        turns += given_now
    assert turns == sorted(turns)
    for first, start in enumerate(turns):
        for count, end in enumerate(turns[first:], start=1):
            assert count <= burst + (end - start) // every


def test_threads_that_ask_at_once_never_share_a_turn(ledger: Ledger):
    start = Barrier(4)

    def ask(_: int) -> list[datetime]:
        start.wait()
        return [turn for _ in range(10) for turn in take(ledger, 1, burst=1)]

    with ThreadPoolExecutor(4) as pool:
        turns = sorted(turn for part in pool.map(ask, range(4)) for turn in part)
    assert turns == [NOW + number * SECOND for number in range(40)]


def ask_from_a_process(url: str) -> list[datetime]:
    ledger = Ledger(url)
    turns = [turn for _ in range(5) for turn in take(ledger, 2, burst=1)]
    ledger.close()
    return turns


def test_processes_that_ask_at_once_never_share_a_turn(ledger: Ledger, ledger_url: str):
    find(ledger)  # a SQLite file is made by its first user
    with get_context("fork").Pool(2) as pool:
        turns = sorted(turn for part in pool.map(ask_from_a_process, [ledger_url] * 2) for turn in part)
        pool.close()
        pool.join()
    assert turns == [NOW + number * SECOND for number in range(20)]


# -- outages


def test_a_cluster_that_nobody_has_seen_down_is_not_known_to_be(ledger: Ledger):
    assert find(ledger) is None
    take(ledger, 1)
    note_up(ledger)
    assert find(ledger) is None


def test_an_outage_is_noted_with_its_begin_and_the_next_look(ledger: Ledger):
    note_down(ledger, None)
    assert find(ledger) == Outage(since=NOW, looks=1, next_look_at=NOW + 10 * SECOND)
    assert find(ledger, "another") is None


def test_each_look_that_finds_it_down_counts_and_keeps_the_begin(ledger: Ledger):
    note_down(ledger, None)
    note_down(ledger, find(ledger), now=NOW + 10 * SECOND, pause=20 * SECOND)
    assert find(ledger) == Outage(since=NOW, looks=2, next_look_at=NOW + 30 * SECOND)


def test_an_outage_that_is_over_is_forgotten_and_the_next_counts_from_one(ledger: Ledger):
    note_down(ledger, None)
    note_down(ledger, find(ledger))
    note_up(ledger)
    assert find(ledger) is None
    note_down(ledger, None, now=NOW + timedelta(hours=1))
    assert find(ledger) == Outage(
        since=NOW + timedelta(hours=1), looks=1, next_look_at=NOW + timedelta(hours=1, seconds=10)
    )


@pytest.mark.parametrize("looks_before", [0, 1, 3])
def test_of_those_who_looked_at_the_same_time_one_is_noted(ledger: Ledger, looks_before: int):
    for _ in range(looks_before):
        note_down(ledger, find(ledger))
    known, start = find(ledger), Barrier(4)

    def look(number: int) -> None:
        start.wait()
        note_down(ledger, known, pause=(number + 1) * SECOND)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look, range(4)))
    noted = find(ledger)
    assert noted is not None
    assert noted.looks == looks_before + 1


def test_who_looked_before_it_came_back_does_not_close_the_gate_again(ledger: Ledger):
    note_down(ledger, None)
    stale = find(ledger)
    note_up(ledger)
    note_down(ledger, stale)
    assert find(ledger) is None
