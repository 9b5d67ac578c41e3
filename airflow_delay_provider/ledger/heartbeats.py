"""Which dispatchers serve this ledger: each writes one small row every few seconds.

All times are of the database's clock, so that dispatchers and readers on different machines agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, delete, select, update

from airflow_delay_provider.domain.clock import ONE_MS, from_ms
from airflow_delay_provider.ledger.dialect import database_now_ms, upsert_into
from airflow_delay_provider.ledger.machine import Machine
from airflow_delay_provider.ledger.records import AnyRow
from airflow_delay_provider.ledger.tables import dispatcher

#: Between two heartbeats.
INTERVAL = timedelta(seconds=5)
#: A dispatcher whose last heartbeat is older does not run any more, or is frozen.
GONE_AFTER = timedelta(seconds=30)
#: Rows of dispatchers that are gone are kept this long, and the newest one until another dispatcher starts.
KEPT = timedelta(days=1)
#: Most rows that are read: a dispatcher that crashes at each start leaves many.
SHOWN = 100
_ROW = dispatcher.c


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopReport:
    """How one loop of a dispatcher was at its last heartbeat."""

    name: str
    #: The last run was good and not too long ago.
    well: bool
    #: None: it has not finished a run yet.
    succeeded_at: datetime | None
    #: Runs that failed, in a row.
    failures: int
    error: str | None

    @property
    def problem(self) -> str | None:
        """What is wrong with it, in words that follow its name; None is nothing."""
        if self.well:
            return None
        since = f"since {_utc(self.succeeded_at)}" if self.succeeded_at else "since its start"
        if self.failures:
            times = "once" if self.failures == 1 else f"{self.failures} times"
            return f"failed {times} {since}: {self.error}"
        if self.error:
            return f"cannot send everything: {self.error}"
        return f"has not finished a run {since}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherRecord:
    """A dispatcher as its heartbeats tell."""

    owner: str
    host: str
    boot_id: str | None
    pid: int
    version: str
    started_at: datetime
    seen_at: datetime
    #: How long ago its last heartbeat was.
    age: timedelta
    #: When it ended as it should; None is one that runs, or that was killed.
    stopped_at: datetime | None
    #: Connections whose journals it follows.
    projects: tuple[str, ...]
    #: Connections whose ladders it serves.
    climbs: tuple[str, ...]
    loops: tuple[LoopReport, ...]

    @property
    def is_alive(self) -> bool:
        """Whether it runs, as far as the ledger knows."""
        return self.stopped_at is None and self.age < GONE_AFTER

    @property
    def destinations(self) -> tuple[str, ...]:
        """Connections to which it sends messages that the ledger holds."""
        return tuple(loop.name.partition(":")[2] for loop in self.loops if loop.name.startswith("dispatch_away:"))

    @property
    def status(self) -> str:
        """One word: ``alive``, ``unwell`` (a loop fails or stands still), ``stopped`` or ``gone``."""
        if self.is_alive:
            return "alive" if all(loop.well for loop in self.loops) else "unwell"
        return "gone" if self.stopped_at is None else "stopped"

    def problem_of(self, *names: str) -> str | None:
        """Return what keeps the named loops from their work; a loop that has not begun yet is no problem."""
        for loop in self.loops:
            if loop.name in names and loop.problem is not None:
                return f"its loop {loop.name} {loop.problem}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a dispatcher tells of itself."""

    owner: str
    machine: Machine
    pid: int
    version: str
    projects: Sequence[str] = ()
    climbs: Sequence[str] = ()
    #: By name: well, milliseconds since the last success, failures in a row, error.
    loops: Mapping[str, Mapping[str, Any]]


def beat(connection: Connection, heartbeat: Heartbeat) -> None:
    """Write that a dispatcher runs: one statement."""
    now_ms = database_now_ms(connection)
    changing = {
        "seen_at_ms": now_ms,
        "stopped_at_ms": None,
        "loops": {name: dict(report) for name, report in heartbeat.loops.items()},
    }
    statement = upsert_into(connection.dialect.name, dispatcher).values(
        owner=heartbeat.owner,
        host=heartbeat.machine.host,
        boot_id=heartbeat.machine.boot_id,
        pid=heartbeat.pid,
        version=heartbeat.version,
        started_at_ms=now_ms,
        projects=list(heartbeat.projects),
        climbs=list(heartbeat.climbs),
        **changing,
    )
    connection.execute(statement.on_conflict_do_update(index_elements=["owner"], set_=changing))


def mark_stopped(connection: Connection, owner: str) -> None:
    """Write that a dispatcher has ended as it should."""
    now_ms = database_now_ms(connection)
    connection.execute(update(dispatcher).where(_ROW.owner == owner).values(seen_at_ms=now_ms, stopped_at_ms=now_ms))


def forget_gone(connection: Connection) -> None:
    """Delete the rows of dispatchers that have been gone for long; called when one starts."""
    connection.execute(delete(dispatcher).where(_ROW.seen_at_ms < database_now_ms(connection) - KEPT // ONE_MS))


def read_dispatchers(connection: Connection) -> list[DispatcherRecord]:
    """Return the dispatchers of this ledger, those seen last first."""
    query = select(dispatcher, database_now_ms(connection).label("now_ms")).order_by(_ROW.seen_at_ms.desc())
    return [_record_of(row) for row in connection.execute(query.limit(SHOWN))]


def _record_of(row: AnyRow) -> DispatcherRecord:
    return DispatcherRecord(
        owner=row.owner,
        host=row.host,
        boot_id=row.boot_id,
        pid=row.pid,
        version=row.version,
        started_at=from_ms(row.started_at_ms),
        seen_at=from_ms(row.seen_at_ms),
        age=timedelta(milliseconds=row.now_ms - row.seen_at_ms),
        stopped_at=None if row.stopped_at_ms is None else from_ms(row.stopped_at_ms),
        projects=tuple(row.projects),
        climbs=tuple(row.climbs),
        loops=tuple(_loop_of(name, report, row.seen_at_ms) for name, report in row.loops.items()),
    )


def _loop_of(name: str, report: Mapping[str, Any], seen_at_ms: int) -> LoopReport:
    ago_ms = report["succeeded_ms_ago"]
    return LoopReport(
        name=name,
        well=report["well"],
        succeeded_at=None if ago_ms is None else from_ms(seen_at_ms - ago_ms),
        failures=report["failures"],
        error=report["error"],
    )


def _utc(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
