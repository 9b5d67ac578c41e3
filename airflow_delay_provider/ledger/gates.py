"""The gate before each Spark cluster: is it known to be down, and whose turn is when. Shared by all tasks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, select, update

from airflow_delay_provider.domain.clock import ONE_MS, ceil_ms, floor_ms, from_ms
from airflow_delay_provider.ledger.dialect import upsert_into
from airflow_delay_provider.ledger.tables import cluster_gate

_GATE = cluster_gate.c


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """A cluster that was seen to be down."""

    since: datetime
    #: Looks that found it down, in a row.
    looks: int
    #: Nobody looks before.
    next_look_at: datetime


def find_outage(connection: Connection, cluster: str) -> Outage | None:
    """Return what is known of a cluster that is down."""
    row = connection.execute(select(cluster_gate).where(_GATE.cluster == cluster)).one_or_none()
    if row is None or row.down_since_ms is None:
        return None
    return Outage(since=from_ms(row.down_since_ms), looks=row.failed_looks, next_look_at=from_ms(row.next_look_at_ms))


def note_down(connection: Connection, cluster: str, *, known: Outage | None, now: datetime, pause: timedelta) -> None:
    """Let nobody look again before ``pause`` is over; whoever has noted it since ``known`` was read goes before."""
    values = {
        "down_since_ms": floor_ms(now) if known is None else floor_ms(known.since),
        "failed_looks": 1 if known is None else known.looks + 1,
        "next_look_at_ms": ceil_ms(now + pause),
    }
    _ensure(connection, cluster)
    seen = _GATE.down_since_ms.is_(None) if known is None else _GATE.failed_looks == known.looks
    connection.execute(update(cluster_gate).where(_GATE.cluster == cluster, seen).values(**values))


def note_up(connection: Connection, cluster: str) -> None:
    """Open the gate."""
    connection.execute(
        update(cluster_gate)
        .where(_GATE.cluster == cluster)
        .values(down_since_ms=None, failed_looks=0, next_look_at_ms=None)
    )


def take_turns(
    connection: Connection, cluster: str, n: int, *, now: datetime, every: timedelta, burst: int
) -> list[datetime]:
    """Return ``n`` moments from now on, so that nobody ever gets more than ``burst`` and one each ``every`` on top.

    A token bucket as one number, the moment at which it would be full again: one short transaction, whoever asks.
    """
    _ensure(connection, cluster)
    row = connection.execute(select(_GATE.full_at_ms).where(_GATE.cluster == cluster).with_for_update()).one()
    step, start = -(-every // ONE_MS), floor_ms(now)
    full_at, turns = max(row.full_at_ms, start), list[int]()
    for _ in range(n):
        turns.append(max(start, full_at - (burst - 1) * step))
        full_at += step
    connection.execute(update(cluster_gate).where(_GATE.cluster == cluster).values(full_at_ms=full_at))
    return [from_ms(turn) for turn in turns]


def _ensure(connection: Connection, cluster: str) -> None:
    row = {"cluster": cluster, "failed_looks": 0, "full_at_ms": 0}
    connection.execute(
        upsert_into(connection.dialect.name, cluster_gate)
        .values(row)
        .on_conflict_do_nothing(index_elements=["cluster"])
    )
