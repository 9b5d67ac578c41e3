"""Read figures of the past and of the near future. The cost depends on the number of intervals, not of messages.

They lag behind the ledger by a few seconds, and stand still while no dispatcher runs: see ``fold``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Connection, and_, cast, func, or_, select
from sqlalchemy.sql import ColumnElement

from airflow_delay_provider.brokers.ledger import histogram
from airflow_delay_provider.brokers.ledger.fold import DAY, DEPTH, HOUR, MINUTE, start_of
from airflow_delay_provider.brokers.ledger.tables import due_count, statistic
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import Change

_ROW = statistic.c
_DUE = due_count.c


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What happened in one interval of time."""

    start: datetime
    scheduled: int
    dispatched: int
    cancelled: int
    #: Dead-lettered or parked.
    dead: int
    #: Scheduled again after they were dispatched or dead.
    requeued: int
    #: Dispatched before they were due, which must not happen; included in ``dispatched``.
    early: int
    #: How many messages were scheduled when the interval was last sampled; None: no dispatcher has sampled it.
    depth: int | None
    #: Lateness in milliseconds of the dispatches whose time is known; None if there is none.
    lateness_p50_ms: float | None
    lateness_p95_ms: float | None
    lateness_p99_ms: float | None
    lateness_max_ms: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DueBin:
    """How many scheduled messages are due in one interval of time."""

    start: datetime
    #: Where the next one starts.
    end: datetime
    n: int


class Window(StrEnum):
    """How far to look ahead or back."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"


#: The interval in seconds, and how many of them.
INTERVALS: Mapping[Window, tuple[int, int]] = {
    Window.HOUR: (MINUTE, 60),
    Window.DAY: (HOUR, 24),
    Window.MONTH: (DAY, 30),
}


def series(connection: Connection, *, now_ms: int, window: Window, destination: str | None = None) -> list[Point]:
    """Return one point for each of the last 60 minutes, 24 hours or 30 days (UTC), the current one included.

    :param destination: one connection, ``""`` for embedded channels; None is everything.
    """
    step, count = INTERVALS[window]
    last_ms = start_of(now_ms, step)
    starts = [last_ms - n * step * 1000 for n in reversed(range(count))]
    key = (_ROW.start_ms, _ROW.kind, _ROW.bucket)
    # Each start by itself: PostgreSQL takes a range of them for more rows than there are, and would read all.
    query = (
        select(*key, cast(func.sum(_ROW.n), BigInteger()), func.max(_ROW.max_ms))
        .where(_ROW.step_seconds == step, _ROW.start_ms.in_(starts))
        .group_by(*key)
    )
    if destination is not None:
        query = query.where(_ROW.destination == destination)
    figures: dict[int, list[tuple[str, int, int, int]]] = {start_ms: [] for start_ms in starts}
    for start_ms, kind, bucket, n, max_ms in connection.execute(query).all():
        figures[start_ms].append((kind, bucket, n, max_ms))
    return [_point_of(start_ms, found) for start_ms, found in figures.items()]


def upcoming(connection: Connection, *, now_ms: int, window: Window, destination: str | None = None) -> list[DueBin]:
    """Return how many scheduled messages are due in each of the next 60 minutes, 24 hours or 30 days (UTC).

    The first bin begins with the current minute, so that overdue messages are not in it.

    :param destination: one connection, ``""`` for embedded channels; None is everything.
    """
    step, count = INTERVALS[window]
    first_ms = start_of(now_ms, step)
    starts = [first_ms + n * step * 1000 for n in range(count)]
    # What is left of the current hour is read in minutes, and what is left of the current day in hours.
    minute_ms = start_of(now_ms, MINUTE)
    hour_ms = minute_ms if step == MINUTE else start_of(now_ms, HOUR) + HOUR * 1000
    day_ms = hour_ms if step < DAY else start_of(now_ms, DAY) + DAY * 1000
    ranges = [
        _is_due(MINUTE, minute_ms, hour_ms),
        _is_due(HOUR, hour_ms, day_ms),
        _is_due(step, day_ms, starts[-1] + step * 1000),
    ]
    n = cast(func.sum(_DUE.n), BigInteger())
    query = select(_DUE.start_ms, n).where(or_(*ranges)).group_by(_DUE.start_ms)
    if destination is not None:
        query = query.where(_DUE.destination == destination)
    found: defaultdict[int, int] = defaultdict(int)
    for start_ms, due in connection.execute(query):
        found[start_of(start_ms, step)] += due
    return [DueBin(start=from_ms(start), end=from_ms(start + step * 1000), n=max(0, found[start])) for start in starts]


def _is_due(step: int, from_ms: int, until_ms: int) -> ColumnElement[bool]:
    return and_(_DUE.step_seconds == step, _DUE.start_ms >= from_ms, _DUE.start_ms < until_ms)


def _point_of(start_ms: int, figures: Sequence[tuple[str, int, int, int]]) -> Point:
    counts: defaultdict[str, int] = defaultdict(int)
    lateness: dict[int, int] = {}
    depth: int | None = None
    max_ms: int | None = None
    for kind, bucket, n, longest in figures:
        counts[kind] += n
        if kind == Change.DISPATCHED:
            lateness[bucket] = n
            if bucket >= 0:
                max_ms = max(longest, max_ms or 0)
        elif kind == DEPTH:
            depth = n
    p50, p95, p99 = histogram.quantiles(lateness, (0.5, 0.95, 0.99), max_ms=max_ms or 0)
    return Point(
        start=from_ms(start_ms),
        scheduled=counts[Change.SCHEDULED],
        dispatched=counts[Change.DISPATCHED],
        cancelled=counts[Change.CANCELLED],
        dead=counts[Change.DEAD_LETTERED] + counts[Change.PARKED],
        requeued=counts[Change.REQUEUED],
        early=lateness.get(histogram.EARLY, 0),
        depth=depth,
        lateness_p50_ms=p50,
        lateness_p95_ms=p95,
        lateness_p99_ms=p99,
        lateness_max_ms=max_ms,
    )
