"""The dispatchers of a ledger, by their heartbeats: on which machine they run, and which messages none of them serves.

Times of heartbeats are those of the database's clock, so that different machines agree.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, select, update

from airflow_delay_provider.brokers.ledger.dialect import database_now_ms, upsert_into
from airflow_delay_provider.brokers.ledger.records import AnyRow
from airflow_delay_provider.brokers.ledger.tables import dispatcher
from airflow_delay_provider.domain.clock import ONE_MS, Clock, from_ms

#: Between two heartbeats.
INTERVAL = timedelta(seconds=3)
#: A dispatcher whose last heartbeat is older has died or is frozen: three in a row are missing.
GONE_AFTER = timedelta(seconds=12)
#: Rows of dead dispatchers are kept this long, and the newest one until another dispatcher starts.
KEPT = timedelta(days=1)
#: Most rows that are read: a dispatcher that crashes at each start leaves many.
SHOWN = 100
_ROW = dispatcher.c
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine, or a container on it."""

    #: Containers have their own name, and two machines may have the same one.
    host: str
    #: The running kernel: all containers of a machine share it, and a restart of the machine changes it. None: unknown.
    boot_id: str | None
    booted_at_ms: int


def process_name() -> str:
    """Return a name that no other process has."""
    return f"{socket.gethostname()}:{os.getpid()}:{os.urandom(3).hex()}"


@cache
def this_machine() -> Machine:
    """Return the machine on which this process runs."""
    return Machine(host=socket.gethostname(), boot_id=_read_boot_id(), booted_at_ms=_booted_at_ms())


def _read_boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def _booted_at_ms() -> int:
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
    return int((time.time() - uptime) * 1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopReport:
    """The health of one loop at the last heartbeat."""

    name: str
    #: The last run succeeded and is not too long ago.
    well: bool
    #: None: it has not finished a run yet.
    succeeded_at: datetime | None
    #: Runs that failed, in a row.
    failures: int
    error: str | None

    @property
    def problem(self) -> str | None:
        """What is wrong with it, to follow its name in a sentence; None if nothing is."""
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
    """A dispatcher, by its last heartbeat."""

    owner: str
    host: str
    boot_id: str | None
    pid: int
    version: str
    started_at: datetime
    seen_at: datetime
    #: How long ago its last heartbeat was.
    age: timedelta
    #: When it stopped cleanly; None if it runs or was killed.
    stopped_at: datetime | None
    #: Connections whose journals it copies into the ledger.
    index_connections: tuple[str, ...]
    #: Kafka connections whose messages it delivers.
    kafka_connections: tuple[str, ...]
    loops: tuple[LoopReport, ...]
    #: Its clock minus the database's clock; None if it was not measured.
    clock_skew: timedelta | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it runs, as far as the ledger knows."""
        return self.stopped_at is None and self.age < GONE_AFTER

    @property
    def destinations(self) -> tuple[str, ...]:
        """Connections to which it sends ledger-held messages."""
        return tuple(loop.name.partition(":")[2] for loop in self.loops if loop.name.startswith("dispatch_to_brokers:"))

    @property
    def status(self) -> str:
        """One word: ``alive``, ``unwell`` (a loop fails or is stalled), ``stopped`` or ``gone``."""
        if self.is_alive:
            return "alive" if all(loop.well for loop in self.loops) else "unwell"
        return "gone" if self.stopped_at is None else "stopped"

    def problem_of(self, *names: str) -> str | None:
        """Return what is wrong with the named loops; a loop that has not started yet is no problem."""
        for loop in self.loops:
            if loop.name in names and loop.problem is not None:
                return f"its loop {loop.name} {loop.problem}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a dispatcher reports."""

    owner: str
    machine: Machine
    pid: int
    version: str
    index_connections: Sequence[str] = ()
    kafka_connections: Sequence[str] = ()
    #: By name: well, milliseconds since the last success, failures in a row, error.
    loops: Mapping[str, Mapping[str, Any]]
    #: Its clock minus the database's clock.
    clock_skew: timedelta | None = None


def measure_clock_skew(connection: Connection, clock: Clock) -> timedelta:
    """Return how far a clock is ahead of the database's clock, at most half of the time of one statement off."""
    before = clock.now()
    database_ms: int = connection.execute(select(database_now_ms(connection))).scalar_one()
    after = clock.now()
    return before + (after - before) / 2 - from_ms(database_ms)


def beat(connection: Connection, heartbeat: Heartbeat) -> None:
    """Write that a dispatcher runs: one statement."""
    now_ms = database_now_ms(connection)
    skew = heartbeat.clock_skew
    changing = {
        "seen_at_ms": now_ms,
        "stopped_at_ms": None,
        "loops": {name: dict(report) for name, report in heartbeat.loops.items()},
        "clock_skew_ms": None if skew is None else round(skew / ONE_MS),
    }
    statement = upsert_into(connection.dialect.name, dispatcher).values(
        owner=heartbeat.owner,
        host=heartbeat.machine.host,
        boot_id=heartbeat.machine.boot_id,
        pid=heartbeat.pid,
        version=heartbeat.version,
        started_at_ms=now_ms,
        index_connections=list(heartbeat.index_connections),
        kafka_connections=list(heartbeat.kafka_connections),
        **changing,
    )
    connection.execute(statement.on_conflict_do_update(index_elements=["owner"], set_=changing))


def mark_stopped(connection: Connection, owner: str) -> None:
    """Write that a dispatcher has stopped cleanly."""
    now_ms = database_now_ms(connection)
    connection.execute(update(dispatcher).where(_ROW.owner == owner).values(seen_at_ms=now_ms, stopped_at_ms=now_ms))


def forget_gone(connection: Connection) -> None:
    """Delete the rows of dispatchers that died long ago; called when one starts."""
    connection.execute(delete(dispatcher).where(_ROW.seen_at_ms < database_now_ms(connection) - KEPT // ONE_MS))


def read_dispatchers(connection: Connection) -> list[DispatcherRecord]:
    """Return the dispatchers of this ledger, the last seen first."""
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
        index_connections=tuple(row.index_connections),
        kafka_connections=tuple(row.kafka_connections),
        loops=tuple(_loop_of(name, report, row.seen_at_ms) for name, report in row.loops.items()),
        clock_skew=None if row.clock_skew_ms is None else timedelta(milliseconds=row.clock_skew_ms),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceGap:
    """Messages that no dispatcher delivers."""

    problem: str
    #: No dispatcher runs, so that starting one helps.
    is_absence: bool

    def describe(self, command: str) -> str:
        """Return the problem, with what to do about it."""
        return f"{self.problem}; start one with `{command}`" if self.is_absence else self.problem


def find_gap(dispatchers: Sequence[DispatcherRecord], *, destination: str | None = None) -> ServiceGap | None:
    """Return why messages of the ledger are not delivered to ``destination``, or to embedded channels for None."""
    if destination is None:
        return _find(dispatchers, "no dispatcher", ("dispatch_embedded",))
    return _find(dispatchers, "no dispatcher", ("serve_destinations", f"dispatch_to_brokers:{destination}"))


def find_kafka_gap(dispatchers: Sequence[DispatcherRecord], conn_id: str) -> ServiceGap | None:
    """Return why messages of a Kafka connection are not delivered; dispatchers of other ledgers are unknown here."""
    serving = [each for each in dispatchers if conn_id in each.kafka_connections]
    return _find(serving, f"no dispatcher that serves the ladder of {conn_id!r}", (f"dispatch_kafka:{conn_id}",))


def _find(dispatchers: Sequence[DispatcherRecord], subject: str, loops: tuple[str, ...]) -> ServiceGap | None:
    alive = [each for each in dispatchers if each.is_alive]
    if not alive:
        return ServiceGap(problem=_describe_absence(dispatchers, subject), is_absence=True)
    problems = [each.problem_of(*loops) for each in alive]
    if None in problems:
        return None
    return ServiceGap(problem=f"dispatcher {alive[0].owner} runs, but {problems[0]}", is_absence=False)


def _describe_absence(dispatchers: Sequence[DispatcherRecord], subject: str) -> str:
    if not dispatchers:
        return f"{subject} has ever been seen in this ledger"
    last = dispatchers[0]
    how = "was stopped then" if last.stopped_at is not None else "sent its last heartbeat then"
    return f"{subject} has been seen since {last.seen_at:%Y-%m-%d %H:%M:%S} UTC ({last.owner} {how})"
