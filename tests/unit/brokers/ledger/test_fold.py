from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select

from airflow_delay_provider.brokers.ledger import fold, journal, projection, scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.fold import DAY, HOUR, MINUTE, start_of
from airflow_delay_provider.brokers.ledger.tables import due_count, event, scheduled_message, statistic
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry, State
from tests.unit.brokers.ledger import rows
from tests.unit.brokers.ledger.rows import NOW_MS, messages
from tests.unit.brokers.ledger.test_counts import Life

DueCounts = dict[tuple[int, int, str], int]


def kept_due_counts(ledger: Ledger) -> DueCounts:
    found = rows.read(ledger, lambda c: c.execute(select(due_count)).all())
    return {(row.step_seconds, row.start_ms, row.destination): row.n for row in found if row.n}


def real_due_counts(ledger: Ledger) -> DueCounts:
    message = scheduled_message.c
    query = select(message.deliver_at_ms, message.destination).where(message.state == State.SCHEDULED.value)
    waiting = rows.read(ledger, lambda c: c.execute(query).all())
    return Counter(
        (step, start_of(due_ms, step), destination or "")
        for due_ms, destination in waiting
        for step in (MINUTE, HOUR, DAY)
    )


def assert_figures_are_true(ledger: Ledger) -> None:
    rows.fold_all(ledger, limit=7)
    assert kept_due_counts(ledger) == real_due_counts(ledger)


def counted_changes(ledger: Ledger, step: int) -> dict[str, int]:
    query = select(statistic.c.kind, func.sum(statistic.c.n)).where(statistic.c.step_seconds == step)
    return {kind: int(n) for kind, n in rows.read(ledger, lambda c: c.execute(query.group_by(statistic.c.kind)).all())}


@pytest.mark.parametrize("seed", range(4))
def test_due_counts_equal_what_counting_finds_whatever_happens(sqlite_url: str, seed: int):
    life = Life(Ledger(sqlite_url), seed)
    for _ in range(10):
        for _ in range(10):
            life.step()
        assert_figures_are_true(life.ledger)
    assert real_due_counts(life.ledger), "this life was too quiet to prove anything"
    life.ledger.close()


def test_due_counts_equal_what_counting_finds_on_postgresql(postgres_url: str):
    life = Life(Ledger(postgres_url), seed=7)
    for _ in range(6):
        for _ in range(20):
            life.step()
        assert_figures_are_true(life.ledger)
    life.ledger.close()


def test_every_change_is_counted_by_minute_and_by_hour(ledger: Ledger):
    life = Life(ledger, seed=11)
    # Pruning removes entries that are counted.
    life.prune = lambda: None  # type: ignore[method-assign]
    for _ in range(80):
        life.step()
    rows.fold_all(ledger, limit=7)
    by_change = select(event.c.change, func.count()).group_by(event.c.change)
    seen = {row[0]: row[1] for row in rows.read(ledger, lambda c: c.execute(by_change).all())}
    assert counted_changes(ledger, MINUTE) == counted_changes(ledger, HOUR) == seen
    assert len(seen) >= 4


def entry(message_id: str, change: Change, *, at_ms: int, due_ms: int) -> JournalEntry:
    return JournalEntry(
        message_id=message_id,
        change=change,
        at=from_ms(at_ms),
        channel="orders",
        deliver_at=from_ms(due_ms),
        position="",
    )


def test_due_counts_follow_the_journal_of_another_broker(ledger: Ledger):
    """A journal that is read again, or that begins in the middle, changes nothing that was counted."""
    later = NOW_MS + 90_000
    pages = [
        [
            entry("a", Change.SCHEDULED, at_ms=NOW_MS, due_ms=later),
            entry("b", Change.SCHEDULED, at_ms=NOW_MS, due_ms=later),
            entry("c", Change.DISPATCHED, at_ms=NOW_MS, due_ms=NOW_MS),
            entry("d", Change.RESCHEDULED, at_ms=NOW_MS, due_ms=later),
        ],
        [
            entry("a", Change.SCHEDULED, at_ms=NOW_MS, due_ms=later),
            entry("a", Change.RESCHEDULED, at_ms=NOW_MS + 1, due_ms=later + 3_600_000),
            entry("b", Change.REFUSED, at_ms=NOW_MS + 2, due_ms=later),
            entry("b", Change.PARKED, at_ms=NOW_MS + 3, due_ms=later),
            entry("c", Change.DEAD_LETTERED, at_ms=NOW_MS + 4, due_ms=NOW_MS),
        ],
        [
            entry("b", Change.REQUEUED, at_ms=NOW_MS + 5, due_ms=later + 60_000),
            entry("d", Change.CANCELLED, at_ms=NOW_MS + 6, due_ms=later),
            entry("d", Change.CANCELLED, at_ms=NOW_MS + 6, due_ms=later),
        ],
    ]
    after = FROM_THE_START
    for n, page in enumerate(pages):
        position = str(n)
        assert ledger.transact(projection.project, "rabbit", page, after=after, position=position)
        after = position
        assert_figures_are_true(ledger)
    assert sum(n for (step, *_), n in kept_due_counts(ledger).items() if step == DAY) == 2


def test_processes_that_fold_at_once_count_each_entry_once(ledger: Ledger):
    batch = messages(*range(200))
    rows.insert(ledger, batch)
    rows.deliver(ledger, now_ms=NOW_MS + 1000)
    others = [Ledger(ledger.url) for _ in range(4)]

    def fold_some(other: Ledger) -> int:
        return sum(other.transact(fold.fold, 7) for _ in range(40))

    with ThreadPoolExecutor(len(others)) as pool:
        folded = sum(pool.map(fold_some, others))
    rows.fold_all(ledger)
    assert 0 < folded <= 400
    assert counted_changes(ledger, HOUR) == {"scheduled": 200, "dispatched": 200}
    assert kept_due_counts(ledger) == {}
    for other in others:
        other.close()


class KilledError(Exception):
    """Stands for a process that is killed."""


def test_a_crash_before_the_commit_neither_loses_nor_repeats_entries(ledger: Ledger):
    rows.insert(ledger, messages(1, 2, 3))
    rows.fold_all(ledger, limit=2)

    def fold_and_crash(connection):
        assert fold.fold(connection, 2) > 0
        raise KilledError

    rows.insert(ledger, messages(4, 5, 6))
    rows.read_journal(ledger, 6)
    with pytest.raises(KilledError):
        ledger.transact(fold_and_crash)
    assert counted_changes(ledger, MINUTE) == {"scheduled": 3}
    assert_figures_are_true(ledger)
    assert counted_changes(ledger, MINUTE) == {"scheduled": 6}


def test_a_message_that_a_transaction_with_a_lower_number_changed_later_is_counted_right(postgres_url: str):
    """The journal is read in the order of transactions, and this message changed in another order."""
    ledger = Ledger(postgres_url)
    first, second = messages(60_000, 120_000)
    rows.insert(ledger, [first])

    with ledger.engine.begin() as early:
        # It gets its number now, and changes the message last.
        early.execute(select(func.pg_current_xact_id()))
        rows.change(ledger, Change.RESCHEDULED, first, deliver_at_ms=NOW_MS + 7_200_000)
        scheduling.change_waiting(early, [first.id], Change.CANCELLED, now_ms=NOW_MS)
        scheduling.insert(early, [second], on_conflict=OnConflict.KEEP, now_ms=NOW_MS)
    changes = [each.change for each in rows.read_journal(ledger, 4)]
    assert changes == [Change.SCHEDULED, Change.CANCELLED, Change.SCHEDULED, Change.RESCHEDULED]
    for limit in (2, 1, 1):
        ledger.transact(fold.fold, limit)
    assert kept_due_counts(ledger) == real_due_counts(ledger) != {}
    ledger.close()


def test_a_message_is_pruned_only_after_its_end_was_counted(ledger: Ledger):
    """Otherwise its due count would stay until its due time."""
    [gone] = messages(86_400_000)
    rows.insert(ledger, [gone])
    rows.fold_all(ledger)
    rows.change(ledger, Change.CANCELLED, gone)

    def prune() -> int:
        return rows.prune(ledger, before_ms=NOW_MS + 1, limit=10)

    assert prune() == 0
    rows.fold_all(ledger)
    assert prune() == 1
    assert kept_due_counts(ledger) == {}


def test_early_dispatches_are_counted_by_themselves(ledger: Ledger):
    page = [entry("a", Change.DISPATCHED, at_ms=NOW_MS - 40, due_ms=NOW_MS)]
    ledger.transact(projection.project, "rabbit", page, after=FROM_THE_START, position="1")
    rows.fold_all(ledger)
    found = rows.read(ledger, lambda c: c.execute(select(statistic).where(statistic.c.step_seconds == MINUTE)).all())
    assert [(row.destination, row.kind, row.bucket, row.n, row.max_ms) for row in found] == [
        ("rabbit", "dispatched", -1, 1, 40)
    ]


def test_old_figures_and_empty_or_past_due_counts_are_pruned(ledger: Ledger):
    now_ms, minute, hour = start_of(NOW_MS, DAY), 60_000, 3_600_000
    waiting, cancelled = messages(0, 0)
    rows.insert(ledger, [waiting, cancelled])
    rows.change(ledger, Change.CANCELLED, cancelled)
    rows.fold_all(ledger)
    for age_ms in (0, 49 * hour, 15 * 24 * hour, 401 * 24 * hour):
        ledger.transact(lambda c, at=now_ms - age_ms: fold.sample_depth(c, now_ms=at))
    ledger.transact(lambda c: fold.prune(c, now_ms=now_ms))
    depth = statistic.c.kind == fold.DEPTH
    kept = rows.read(ledger, lambda c: c.execute(select(statistic).where(depth)).all())
    assert {(row.step_seconds, row.start_ms) for row in kept} == {
        (MINUTE, now_ms),
        (HOUR, now_ms),
        (HOUR, now_ms - 49 * hour),
        (DAY, now_ms),
        (DAY, now_ms - 72 * hour),
        (DAY, now_ms - 15 * 24 * hour),
    }
    assert kept_due_counts(ledger) == real_due_counts(ledger)
    ledger.transact(lambda c: fold.prune(c, now_ms=start_of(NOW_MS, MINUTE) + minute + hour))
    assert {step for step, *_ in kept_due_counts(ledger)} == {HOUR, DAY}
    ledger.transact(lambda c: fold.prune(c, now_ms=now_ms + 25 * hour))
    assert kept_due_counts(ledger) == {}


def test_reading_on_does_not_read_the_journal_from_its_start(sqlite_url: str):
    """B20: a comparison of pairs would, on SQLite."""
    ledger = Ledger(sqlite_url)
    with ledger.read() as connection:
        query = journal.entries_after(connection, "0:5").limit(10)
        sql = str(query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
        plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}")]
    assert plan == ["SEARCH delay_event USING INTEGER PRIMARY KEY (rowid>?)"]
    ledger.close()
