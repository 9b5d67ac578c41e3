"""Statements on the circuits of Spark clusters: is a cluster known to be down, and when may the next job go to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Connection, select, true, update

from airflow_delay_provider.brokers.ledger.dialect import upsert_into
from airflow_delay_provider.brokers.ledger.tables import cluster_circuit
from airflow_delay_provider.domain.clock import ONE_MS, ceil_ms, floor_ms, from_ms

_CIRCUIT = cluster_circuit.c


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """A cluster that a check has found down."""

    since: datetime
    #: Checks in a row that found it down.
    failed_checks: int
    #: No process checks before.
    next_check_at: datetime


def find_outage(connection: Connection, cluster: str) -> Outage | None:
    """Return the outage of a cluster that is known to be down."""
    return _read(connection, _CIRCUIT.cluster == cluster).get(cluster)


def find_outages(connection: Connection) -> dict[str, Outage]:
    """Return the outages of all clusters that are known to be down."""
    return _read(connection, true())


def _read(connection: Connection, condition: ColumnElement[bool]) -> dict[str, Outage]:
    rows = connection.execute(select(cluster_circuit).where(condition, _CIRCUIT.down_since_ms.is_not(None)))
    return {
        row.cluster: Outage(
            since=from_ms(row.down_since_ms),
            failed_checks=row.failed_checks,
            next_check_at=from_ms(row.next_check_at_ms),
        )
        for row in rows
    }


def open_circuit(
    connection: Connection, cluster: str, *, known: Outage | None, now: datetime, pause: timedelta
) -> None:
    """Prevent checks until ``pause`` is over, unless another process has recorded one since ``known`` was read."""
    values = {
        "down_since_ms": floor_ms(now) if known is None else floor_ms(known.since),
        "failed_checks": 1 if known is None else known.failed_checks + 1,
        "next_check_at_ms": ceil_ms(now + pause),
    }
    _ensure_row(connection, cluster)
    unchanged = _CIRCUIT.down_since_ms.is_(None) if known is None else _CIRCUIT.failed_checks == known.failed_checks
    connection.execute(update(cluster_circuit).where(_CIRCUIT.cluster == cluster, unchanged).values(**values))


def close_circuit(connection: Connection, cluster: str) -> None:
    """Record that the cluster is up."""
    connection.execute(
        update(cluster_circuit)
        .where(_CIRCUIT.cluster == cluster)
        .values(down_since_ms=None, failed_checks=0, next_check_at_ms=None)
    )


def take_tokens(
    connection: Connection, cluster: str, n: int, *, now: datetime, every: timedelta, burst: int
) -> list[datetime]:
    """Return ``n`` times from now on: at most ``burst`` at once, then one each ``every``.

    The token bucket is one number, the time at which it would be full again, so this is one short transaction.
    """
    _ensure_row(connection, cluster)
    row = connection.execute(
        select(_CIRCUIT.bucket_full_at_ms).where(_CIRCUIT.cluster == cluster).with_for_update()
    ).one()
    step, start = -(-every // ONE_MS), floor_ms(now)
    full_at, times = max(row.bucket_full_at_ms, start), list[int]()
    for _ in range(n):
        times.append(max(start, full_at - (burst - 1) * step))
        full_at += step
    connection.execute(update(cluster_circuit).where(_CIRCUIT.cluster == cluster).values(bucket_full_at_ms=full_at))
    return [from_ms(each) for each in times]


def _ensure_row(connection: Connection, cluster: str) -> None:
    row = {"cluster": cluster, "failed_checks": 0, "bucket_full_at_ms": 0}
    connection.execute(
        upsert_into(connection.dialect.name, cluster_circuit)
        .values(row)
        .on_conflict_do_nothing(index_elements=["cluster"])
    )
