from __future__ import annotations

import pytest
from sqlalchemy import literal, select

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.histogram import BOUNDS_MS, EARLY, LATER, bucket_of, quantiles
from tests.unit.brokers.ledger import rows


def test_the_bounds_rise_about_six_in_each_decade_from_a_millisecond_to_a_day():
    assert list(BOUNDS_MS) == sorted(set(BOUNDS_MS))
    assert (BOUNDS_MS[0], BOUNDS_MS[-1]) == (1, 86_400_000)
    assert [bound for bound in BOUNDS_MS if 1000 <= bound < 10_000] == [1000, 1500, 2200, 3300, 4700, 6800]


@pytest.mark.parametrize(
    ("lateness_ms", "bucket"),
    [(-5, EARLY), (-1, EARLY), (0, 1), (1, 1), (2, 2), (4, 5), (11, 15), (86_400_000, 86_400_000), (86_400_001, LATER)],
)
def test_the_database_finds_the_bucket_whose_upper_bound_is_not_exceeded(ledger: Ledger, lateness_ms: int, bucket: int):
    found = rows.read(ledger, lambda c: c.execute(select(bucket_of(literal(lateness_ms)))).scalar())
    assert found == bucket


def test_a_quantile_is_interpolated_in_its_bucket():
    assert quantiles({}, [0.5, 0.9], max_ms=0) == [None, None]
    assert quantiles({100: 10}, [0.5], max_ms=100) == [84]
    assert quantiles({100: 10, 150: 90}, [0.1, 0.55], max_ms=150) == [100, 125]
    assert quantiles({100: 1, 150: 1}, [1.0], max_ms=120) == [120]


def test_several_quantiles_may_be_in_one_bucket_or_far_apart():
    counts = {1: 1, 100: 10, 1000: 1}
    shares = [0.05, 0.5, 0.6, 0.99, 1.0]
    assert quantiles(counts, shares, max_ms=1000) == [quantiles(counts, [each], max_ms=1000)[0] for each in shares]


def test_no_quantile_exceeds_the_longest_lateness():
    assert quantiles({1: 100}, [0.99], max_ms=0) == [0]
    assert quantiles({LATER: 2}, [0.5, 1.0], max_ms=100_000_000) == [pytest.approx(93_200_000), 100_000_000]


def test_early_messages_are_not_part_of_the_quantiles():
    assert quantiles({EARLY: 100}, [0.5], max_ms=0) == [None]
    assert quantiles({EARLY: 100, 10: 1}, [1.0], max_ms=9) == [9]
