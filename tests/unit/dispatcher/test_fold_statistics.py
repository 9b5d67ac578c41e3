"""The loop that folds the journal into figures."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from airflow_delay_provider.brokers.ledger import fold, statistics
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.statistics import Window
from airflow_delay_provider.brokers.ledger.tables import statistic
from airflow_delay_provider.dispatcher import fold_statistics
from airflow_delay_provider.dispatcher.fold_statistics import INTERVAL, FoldStatistics
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock
from tests.unit.brokers.ledger import rows

MINUTE = timedelta(minutes=1)


def schedule(context: Context, n: int, delay: timedelta = MINUTE) -> None:
    due = context.clock.now() + delay
    batch = [Message(channel="c", payload=b"", deliver_at=due) for _ in range(n)]
    EmbeddedBroker(context.ledger, clock=context.clock).schedule(batch)


def upcoming(context: Context) -> int:
    return sum(
        bin.n
        for bin in rows.read(
            context.ledger, lambda c: statistics.upcoming(c, now_ms=context.now_ms(), window=Window.HOUR)
        )
    )


def test_it_folds_page_after_page_and_then_pauses(context: Context, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fold_statistics, "PAGE", 10)
    loop = FoldStatistics(context)
    schedule(context, 25)
    rows.read_journal(context.ledger, 25)
    assert [loop.run_once() for _ in range(3)] == [0.0, 0.0, INTERVAL.total_seconds()]
    assert upcoming(context) == 25


def test_it_samples_the_number_of_scheduled_messages_once_a_minute(context: Context, clock: SettableClock):
    loop, other = FoldStatistics(context), FoldStatistics(context)
    for _ in range(3):
        schedule(context, 2)
        for _ in range(4):
            loop.run_once()
            other.run_once()
        clock.advance(MINUTE)
    depths = select(func.count(), func.sum(statistic.c.n)).where(
        statistic.c.kind == fold.DEPTH, statistic.c.step_seconds == fold.MINUTE
    )
    assert tuple(rows.read(context.ledger, lambda c: c.execute(depths).one())) == (3, 2 + 4 + 6)


def test_it_prunes_old_figures_once_an_hour(context: Context, clock: SettableClock):
    loop = FoldStatistics(context)
    loop.run_once()
    schedule(context, 1)
    loop.run_once()
    clock.advance(timedelta(days=401))
    loop.run_once()
    kept = rows.read(context.ledger, lambda c: c.execute(select(func.min(statistic.c.start_ms))).scalar())
    assert kept is not None
    assert kept >= context.now_ms() - 24 * 60 * 60 * 1000
