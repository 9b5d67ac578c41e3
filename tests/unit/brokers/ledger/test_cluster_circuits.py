from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from threading import Barrier
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_delay_provider.brokers.ledger import cluster_circuits as cluster_circuits
from airflow_delay_provider.brokers.ledger.cluster_circuits import Outage
from airflow_delay_provider.brokers.ledger.database import Ledger
from tests.unit.brokers.ledger import rows

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
    return ledger.transact(lambda c: cluster_circuits.take_tokens(c, cluster, n, now=now, every=every, burst=burst))


def find(ledger: Ledger, cluster: str = CLUSTER) -> Outage | None:
    return rows.read(ledger, lambda c: cluster_circuits.find_outage(c, cluster))


def open_circuit(ledger: Ledger, known: Outage | None, *, now: datetime = NOW, pause: timedelta = 10 * SECOND) -> None:
    ledger.transact(lambda c: cluster_circuits.open_circuit(c, CLUSTER, known=known, now=now, pause=pause))


def close_circuit(ledger: Ledger) -> None:
    ledger.transact(lambda c: cluster_circuits.close_circuit(c, CLUSTER))


# -- tokens


def test_a_full_bucket_gives_its_burst_at_once_and_then_one_token_each_step(ledger: Ledger):
    assert take(ledger, 6) == [NOW, NOW, NOW, NOW + SECOND, NOW + 2 * SECOND, NOW + 3 * SECOND]


def test_tokens_taken_one_by_one_are_the_same_as_taken_together(ledger: Ledger):
    one_by_one = [token for _ in range(6) for token in take(ledger, 1)]
    assert one_by_one == take(ledger, 6, cluster="another")


def test_a_bucket_that_was_left_alone_is_full_again_and_no_fuller(ledger: Ledger):
    take(ledger, 6)
    later = NOW + 6 * SECOND
    assert take(ledger, 4, now=later) == [later, later, later, later + SECOND]
    much_later = NOW + timedelta(days=30)
    assert take(ledger, 4, now=much_later) == [much_later, much_later, much_later, much_later + SECOND]


def test_a_bucket_that_was_left_alone_for_a_step_has_one_token_more(ledger: Ledger):
    take(ledger, 3)
    assert take(ledger, 2, now=NOW + SECOND) == [NOW + SECOND, NOW + 2 * SECOND]


def test_clusters_have_buckets_of_their_own(ledger: Ledger):
    take(ledger, 10)
    assert take(ledger, 1, cluster="another") == [NOW]


def test_without_a_burst_tokens_are_a_step_apart(ledger: Ledger):
    assert take(ledger, 3, burst=1) == [NOW, NOW + SECOND, NOW + 2 * SECOND]


def test_no_request_takes_no_token(ledger: Ledger):
    assert take(ledger, 0) == []
    assert take(ledger, 1) == [NOW]


def test_a_rate_that_is_no_whole_number_of_milliseconds_is_not_exceeded(ledger: Ledger):
    tokens = take(ledger, 3001, every=SECOND / 3, burst=1)
    assert tokens[-1] - tokens[0] >= 1000 * SECOND


def test_an_outage_changes_no_token(ledger: Ledger):
    take(ledger, 4)
    open_circuit(ledger, None)
    close_circuit(ledger)
    assert take(ledger, 1) == [NOW + 2 * SECOND]


#: Times at which tasks ask, as milliseconds after the one before, and for how many tokens.
ARRIVALS = st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 8)), min_size=1, max_size=12)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(arrivals=ARRIVALS, every_ms=st.integers(1, 1500), burst=st.integers(1, 5))
def test_in_no_span_of_time_are_there_more_tokens_than_the_burst_and_one_each_step(
    ledger: Ledger, arrivals: list[tuple[int, int]], every_ms: int, burst: int
):
    every, cluster, now = timedelta(milliseconds=every_ms), uuid4().hex, NOW
    tokens: list[datetime] = []
    for pause_ms, n in arrivals:
        now += timedelta(milliseconds=pause_ms)
        given_now = take(ledger, n, now=now, every=every, burst=burst, cluster=cluster)
        assert min(given_now) >= now
        tokens += given_now
    assert tokens == sorted(tokens)
    for first, start in enumerate(tokens):
        for count, end in enumerate(tokens[first:], start=1):
            assert count <= burst + (end - start) // every


def test_threads_that_ask_at_once_never_share_a_token(ledger: Ledger):
    start = Barrier(4)

    def ask(_: int) -> list[datetime]:
        start.wait()
        return [token for _ in range(10) for token in take(ledger, 1, burst=1)]

    with ThreadPoolExecutor(4) as pool:
        tokens = sorted(token for part in pool.map(ask, range(4)) for token in part)
    assert tokens == [NOW + number * SECOND for number in range(40)]


def ask_from_a_process(url: str) -> list[datetime]:
    ledger = Ledger(url)
    tokens = [token for _ in range(5) for token in take(ledger, 2, burst=1)]
    ledger.close()
    return tokens


def test_processes_that_ask_at_once_never_share_a_token(ledger: Ledger, ledger_url: str):
    find(ledger)  # a SQLite file is made by its first user
    with get_context("fork").Pool(2) as pool:
        tokens = sorted(token for part in pool.map(ask_from_a_process, [ledger_url] * 2) for token in part)
        pool.close()
        pool.join()
    assert tokens == [NOW + number * SECOND for number in range(20)]


# -- outages


def test_a_cluster_that_no_check_found_down_is_not_known_to_be(ledger: Ledger):
    assert find(ledger) is None
    take(ledger, 1)
    close_circuit(ledger)
    assert find(ledger) is None


def test_an_outage_is_recorded_with_its_begin_and_the_next_check(ledger: Ledger):
    open_circuit(ledger, None)
    assert find(ledger) == Outage(since=NOW, failed_checks=1, next_check_at=NOW + 10 * SECOND)
    assert find(ledger, "another") is None


def test_each_check_that_finds_it_down_counts_and_keeps_the_begin(ledger: Ledger):
    open_circuit(ledger, None)
    open_circuit(ledger, find(ledger), now=NOW + 10 * SECOND, pause=20 * SECOND)
    assert find(ledger) == Outage(since=NOW, failed_checks=2, next_check_at=NOW + 30 * SECOND)


def test_an_outage_that_is_over_is_forgotten_and_the_next_counts_from_one(ledger: Ledger):
    open_circuit(ledger, None)
    open_circuit(ledger, find(ledger))
    close_circuit(ledger)
    assert find(ledger) is None
    open_circuit(ledger, None, now=NOW + timedelta(hours=1))
    assert find(ledger) == Outage(
        since=NOW + timedelta(hours=1), failed_checks=1, next_check_at=NOW + timedelta(hours=1, seconds=10)
    )


@pytest.mark.parametrize("checks_before", [0, 1, 3])
def test_of_checks_at_the_same_time_one_is_recorded(ledger: Ledger, checks_before: int):
    for _ in range(checks_before):
        open_circuit(ledger, find(ledger))
    known, start = find(ledger), Barrier(4)

    def check(number: int) -> None:
        start.wait()
        open_circuit(ledger, known, pause=(number + 1) * SECOND)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(4)))
    recorded = find(ledger)
    assert recorded is not None
    assert recorded.failed_checks == checks_before + 1


def test_a_check_from_before_the_cluster_came_back_does_not_open_the_circuit_again(ledger: Ledger):
    open_circuit(ledger, None)
    stale = find(ledger)
    close_circuit(ledger)
    open_circuit(ledger, stale)
    assert find(ledger) is None
