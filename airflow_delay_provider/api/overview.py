"""Routes for the overview: health, figures over time, and what is due soon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Query
from sqlalchemy import select

from airflow_delay_provider.api.auth import CurrentPermissions, mask_secrets
from airflow_delay_provider.api.health import Observed, find_problems
from airflow_delay_provider.api.ledgers import RequestedLedger
from airflow_delay_provider.api.models import Text
from airflow_delay_provider.api.overview_models import (
    BrokerStatus,
    DispatcherLoop,
    DispatcherStatus,
    DueBin,
    Health,
    Lateness,
    Me,
    Series,
    SeriesPoint,
    TopologyIssue,
    Upcoming,
)
from airflow_delay_provider.api.problems import describes
from airflow_delay_provider.api.retries import circuit_of
from airflow_delay_provider.brokers.ledger import broker_status, cluster_circuits, listing, overdue, search, statistics
from airflow_delay_provider.brokers.ledger.dialect import database_now_ms
from airflow_delay_provider.brokers.ledger.heartbeats import DispatcherRecord, read_dispatchers
from airflow_delay_provider.brokers.ledger.statistics import INTERVALS, Point, Window
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED
from airflow_delay_provider.domain.arguments import Hold
from airflow_delay_provider.domain.clock import ONE_MS, floor_ms, from_ms
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID

router = APIRouter(tags=["overview"])

#: Who holds the messages that a loop dispatches, or whose dispatches it reads. Its name ends with their connection.
_HOLD_OF_LOOP = {
    "dispatch_embedded": Hold.LEDGER,
    "dispatch_to_brokers": Hold.LEDGER,
    "dispatch_kafka": Hold.BROKER,
    "project_journal": Hold.BROKER,
}

Range = Annotated[Window, Query(alias="range")]


@router.get("/me", responses=describes())
def get_me(permissions: CurrentPermissions, conn_id: Annotated[Text | None, Query()] = None) -> Me:
    """Return who you are and what you may do."""
    return Me(
        user=permissions.user.get_name(),
        is_administrator=permissions.may_edit_connection(conn_id or DEFAULT_CONN_ID),
    )


@router.get("/health", responses=describes(404))
def get_health(opened: RequestedLedger) -> Health:
    """Return the dispatchers and brokers, and what needs attention."""
    with opened.ledger.read() as connection:
        n_overdue, oldest_ms = search.count_overdue(connection, now_ms=opened.now_ms(), destination=opened.destination)
        first_due = overdue.first_due_by_connection(connection)
        observed = Observed(
            now=opened.now(),
            database_now=from_ms(connection.execute(select(database_now_ms(connection))).scalar_one()),
            dispatchers=read_dispatchers(connection),
            brokers=broker_status.read_all(connection),
            outages=cluster_circuits.find_outages(connection),
            waiting_embedded=listing.count_by_state(connection, destination=EMBEDDED)[State.SCHEDULED],
            waiting_destinations=listing.waiting_destinations(connection),
            overdue=n_overdue,
            oldest_due=None if oldest_ms is None else from_ms(oldest_ms),
        )
    return Health(
        problems=find_problems(observed),
        dispatchers=[_dispatcher(each, first_due, now_ms=floor_ms(observed.now)) for each in observed.dispatchers],
        brokers=[_broker(each) for each in observed.brokers],
        circuits=[circuit_of(cluster, outage) for cluster, outage in sorted(observed.outages.items())],
        api_clock_skew_ms=observed.api_skew // ONE_MS,
        now=observed.now,
    )


@router.get("/series", responses=describes(404))
def get_series(
    opened: RequestedLedger, window: Range = Window.HOUR, connection: Annotated[Text | None, Query()] = None
) -> Series:
    """Return what happened in the last hour, day or 30 days, and how late messages were."""
    with opened.ledger.read() as database:
        points = statistics.series(
            database, now_ms=opened.now_ms(), window=window, destination=opened.destination_of(connection)
        )
    step, _ = INTERVALS[window]
    return Series(step_seconds=step, points=[_point(each) for each in points])


@router.get("/upcoming", responses=describes(404))
def get_upcoming(
    opened: RequestedLedger, window: Range = Window.HOUR, connection: Annotated[Text | None, Query()] = None
) -> Upcoming:
    """Return how many scheduled messages are due in each part of the next hour, day or 30 days."""
    with opened.ledger.read() as database:
        bins = statistics.upcoming(
            database, now_ms=opened.now_ms(), window=window, destination=opened.destination_of(connection)
        )
    step, _ = INTERVALS[window]
    return Upcoming(step_seconds=step, bins=[DueBin(at=each.start, count=each.n) for each in bins])


def _dispatcher(
    record: DispatcherRecord, first_due: Mapping[tuple[Hold, str], int], *, now_ms: int
) -> DispatcherStatus:
    return DispatcherStatus(
        name=record.owner,
        status=cast(Literal["alive", "unwell", "stopped", "gone"], record.status),
        host=record.host,
        pid=record.pid,
        version=record.version,
        started_at=record.started_at,
        seen_at=record.seen_at,
        stopped_at=record.stopped_at,
        clock_skew_ms=None if record.clock_skew is None else record.clock_skew // ONE_MS,
        loops=[
            DispatcherLoop(
                name=loop.name,
                is_healthy=loop.well,
                last_success_at=loop.succeeded_at,
                failures=loop.failures,
                error=None if loop.error is None else mask_secrets(loop.error),
                lag_ms=_lag_ms(loop.name, first_due, now_ms),
            )
            for loop in record.loops
        ],
    )


def _lag_ms(loop: str, first_due: Mapping[tuple[Hold, str], int], now_ms: int) -> int | None:
    work, _, conn_id = loop.partition(":")
    hold = _HOLD_OF_LOOP.get(work)
    return None if hold is None else max(0, now_ms - first_due.get((hold, conn_id), now_ms))


def _broker(status: broker_status.BrokerStatus) -> BrokerStatus:
    return BrokerStatus(
        connection=status.conn_id,
        is_reachable=status.reachable,
        checked_at=status.checked_at,
        description=None if status.description is None else mask_secrets(status.description),
        error=None if status.error is None else mask_secrets(status.error),
        topology_verified_at=status.topology_verified_at,
        topology_issues=[
            TopologyIssue(text=mask_secrets(issue.text), is_problem=issue.is_problem)
            for issue in status.topology_issues
        ],
        clock_skew_ms=None if status.clock_skew is None else status.clock_skew // ONE_MS,
    )


def _point(point: Point) -> SeriesPoint:
    lateness = None
    if point.lateness_p50_ms is not None:
        lateness = Lateness(
            p50_ms=point.lateness_p50_ms,
            p95_ms=point.lateness_p95_ms or 0,
            p99_ms=point.lateness_p99_ms or 0,
            max_ms=point.lateness_max_ms or 0,
        )
    return SeriesPoint(
        at=point.start,
        scheduled=point.scheduled,
        dispatched=point.dispatched,
        cancelled=point.cancelled,
        dead=point.dead,
        depth=point.depth,
        lateness=lateness,
        early=point.early,
    )
