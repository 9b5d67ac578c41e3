from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from airflow_delay_provider.brokers.ledger import delivery, fold, listing, projection, statistics
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.fold import DAY, HOUR, start_of
from airflow_delay_provider.brokers.ledger.statistics import DueBin, Point, Window
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, TIME_UNKNOWN, Change, JournalEntry, State
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, messages

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
START_MS = start_of(NOW_MS, HOUR)


def series(ledger: Ledger, now_ms: int, window: Window, destination: str | None = None) -> list[Point]:
    return rows.read(ledger, lambda c: statistics.series(c, now_ms=now_ms, window=window, destination=destination))


def upcoming(ledger: Ledger, now_ms: int, window: Window, destination: str | None = None) -> list[DueBin]:
    return rows.read(ledger, lambda c: statistics.upcoming(c, now_ms=now_ms, window=window, destination=destination))


@pytest.mark.parametrize(
    ("window", "step_ms", "count"),
    [(Window.HOUR, MINUTE_MS, 60), (Window.DAY, HOUR_MS, 24), (Window.MONTH, DAY_MS, 30)],
)
def test_a_series_has_a_point_for_each_interval_and_none_is_left_out(
    ledger: Ledger, window: Window, step_ms: int, count: int
):
    found = series(ledger, NOW_MS, window)
    last = start_of(NOW_MS, step_ms // 1000)
    assert [point.start for point in found] == [from_ms(last - n * step_ms) for n in reversed(range(count))]
    empty = replace(found[0], start=found[1].start)
    assert empty == found[1]
    assert (empty.scheduled, empty.depth, empty.lateness_p50_ms, empty.lateness_max_ms) == (0, None, None, None)


def test_changes_are_in_the_interval_in_which_they_happened(ledger: Ledger):
    rows.insert(ledger, messages(1, 1, 1))
    rows.fold_all(ledger)
    later = series(ledger, NOW_MS + 2 * MINUTE_MS, Window.HOUR)
    assert [point.scheduled for point in later] == [*[0] * 57, 3, 0, 0]
    assert sum(point.scheduled for point in series(ledger, NOW_MS + 60 * MINUTE_MS, Window.HOUR)) == 0
    assert sum(point.scheduled for point in series(ledger, NOW_MS - MINUTE_MS, Window.HOUR)) == 0


def test_a_point_tells_what_happened_and_how_late(ledger: Ledger):
    ours, [theirs] = messages(*range(100), 10**6), messages(10**6)
    rows.insert(ledger, ours)
    rows.insert(ledger, [theirs], destination="rabbit")
    rows.change(ledger, Change.CANCELLED, ours[-1])
    rows.deliver(ledger, now_ms=NOW_MS + 99)
    rows.fold_all(ledger)
    ledger.transact(lambda c: fold.sample_depth(c, now_ms=NOW_MS))
    for window in Window:
        point = series(ledger, NOW_MS, window)[-1]
        assert (point.scheduled, point.dispatched, point.cancelled, point.dead, point.early) == (102, 100, 1, 0, 0)
        assert (point.depth, point.lateness_max_ms) == (1, 99)
        assert point.lateness_p50_ms == pytest.approx(49.5, abs=2)
        assert point.lateness_p95_ms == pytest.approx(95, abs=2)
        assert point.lateness_p99_ms == pytest.approx(99, abs=2)
    of_rabbit = series(ledger, NOW_MS, Window.HOUR, "rabbit")[-1]
    assert (of_rabbit.scheduled, of_rabbit.dispatched, of_rabbit.depth) == (1, 0, 1)
    embedded = series(ledger, NOW_MS, Window.HOUR, "")[-1]
    assert (embedded.scheduled, embedded.dispatched, embedded.depth) == (101, 100, 0)


def test_a_dispatch_at_an_unknown_time_is_counted_and_not_measured(ledger: Ledger):
    unknown, known = messages(0, 0)
    entries = [
        JournalEntry(
            message_id=each.id,
            change=Change.DISPATCHED,
            at=from_ms(NOW_MS + late_ms),
            channel=each.channel,
            deliver_at=each.deliver_at,
            position=str(late_ms),
            reason=reason,
            message=each,
        )
        for each, late_ms, reason in ((unknown, 0, TIME_UNKNOWN), (known, 40, None))
    ]
    assert ledger.transact(projection.project, "rabbit", entries[:1], after=FROM_THE_START, position="0")
    rows.fold_all(ledger)
    record, point = rows.get(ledger, unknown), series(ledger, NOW_MS, Window.HOUR)[-1]
    assert (record.state, record.dispatched_at, record.lateness) == (State.DISPATCHED, None, None)
    [entry] = rows.read(ledger, lambda c: listing.get_history(c, unknown.id))
    assert (entry.reason, entry.lateness) == (TIME_UNKNOWN, None)
    assert (point.dispatched, point.early, point.lateness_p50_ms, point.lateness_max_ms) == (1, 0, None, None)
    assert ledger.transact(projection.project, "rabbit", entries[1:], after="0", position="1")
    rows.fold_all(ledger)
    point = series(ledger, NOW_MS, Window.HOUR)[-1]
    assert (point.dispatched, point.lateness_p50_ms, point.lateness_max_ms) == (2, pytest.approx(36, abs=4), 40)


def test_dead_and_requeued_messages_are_counted(ledger: Ledger):
    rows.insert(ledger, messages(-1, -1), destination="rabbit")
    claims = ledger.transact(
        lambda c: delivery.claim_due(
            c, destination="rabbit", owner="o", now_ms=NOW_MS, until_ms=NOW_MS + 1000, limit=10
        )
    )
    ledger.transact(lambda c: delivery.mark_dead(c, claims, now_ms=NOW_MS, reason="no"))
    rows.fold_all(ledger)
    point = series(ledger, NOW_MS, Window.HOUR)[-1]
    assert (point.dead, point.requeued, point.dispatched) == (2, 0, 0)


def test_the_depth_of_an_interval_is_its_last_sample(ledger: Ledger):
    for n in range(3):
        rows.insert(ledger, messages(1))
        ledger.transact(lambda c, at=START_MS + n * MINUTE_MS: fold.sample_depth(c, now_ms=at))
    minutes = series(ledger, START_MS + 3 * MINUTE_MS, Window.HOUR)
    assert [point.depth for point in minutes[-5:]] == [None, 1, 2, 3, None]
    assert [point.depth for point in series(ledger, START_MS, Window.DAY)[-2:]] == [None, 3]


def test_due_messages_are_told_by_minute_hour_and_day(ledger: Ledger):
    now_ms = start_of(NOW_MS, DAY) + 5 * HOUR_MS + 30 * MINUTE_MS + 10_000
    due = [0, 30_000, MINUTE_MS, 29 * MINUTE_MS, HOUR_MS, 20 * HOUR_MS, DAY_MS, 29 * DAY_MS]
    rows.insert(ledger, messages(*(now_ms - NOW_MS + each for each in due)))
    rows.fold_all(ledger)
    minutes = upcoming(ledger, now_ms, Window.HOUR)
    assert [bin.n for bin in minutes] == [2, 1, *[0] * 27, 1, *[0] * 30]
    assert (minutes[0].start, minutes[0].end) == (from_ms(now_ms - 10_000), from_ms(now_ms + 50_000))
    hours = upcoming(ledger, now_ms, Window.DAY)
    assert [bin.n for bin in hours] == [4, 1, *[0] * 18, 1, 0, 0, 0]
    days = upcoming(ledger, now_ms, Window.MONTH)
    assert [bin.n for bin in days] == [5, 2, *[0] * 27, 1]
    assert days[0].start == from_ms(start_of(now_ms, DAY))
    for found in (minutes, hours, days):
        assert all(bin.end == following.start for bin, following in pairwise(found))


@pytest.mark.parametrize("window", list(Window))
def test_overdue_messages_are_not_upcoming(ledger: Ledger, window: Window):
    now_ms = start_of(NOW_MS, DAY) + 5 * HOUR_MS + 30 * MINUTE_MS
    rows.insert(ledger, messages(*(now_ms - NOW_MS - each for each in (1, MINUTE_MS, HOUR_MS, DAY_MS))))
    rows.fold_all(ledger)
    assert sum(bin.n for bin in upcoming(ledger, now_ms, window)) == 0


@pytest.mark.parametrize("window", list(Window))
@pytest.mark.parametrize("at_ms", [0, 1, MINUTE_MS, HOUR_MS - 1, HOUR_MS, 23 * HOUR_MS + 59 * MINUTE_MS])
def test_each_message_is_in_one_bin_at_any_time_of_the_day(sqlite_url: str, window: Window, at_ms: int):
    ledger = Ledger(sqlite_url)
    now_ms = start_of(NOW_MS, DAY) + at_ms
    rows.insert(ledger, messages(*(now_ms - NOW_MS + n * 17 * MINUTE_MS for n in range(3000))))
    rows.fold_all(ledger)
    for each in upcoming(ledger, now_ms, window):
        begin_ms, end_ms = (int(moment.timestamp() * 1000) for moment in (each.start, each.end))
        due = [now_ms + n * 17 * MINUTE_MS for n in range(3000)]
        assert each.n == sum(begin_ms <= due_ms < end_ms for due_ms in due)
    ledger.close()


def test_upcoming_messages_of_one_connection(ledger: Ledger):
    rows.insert(ledger, messages(1000, 1000))
    rows.insert(ledger, messages(1000), destination="rabbit")
    rows.fold_all(ledger)
    counts = {
        destination: sum(bin.n for bin in upcoming(ledger, NOW_MS, Window.DAY, destination))
        for destination in (None, "", "rabbit", "no-such")
    }
    assert counts == {None: 3, "": 2, "rabbit": 1, "no-such": 0}
