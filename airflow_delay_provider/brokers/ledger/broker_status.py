"""The brokers of a ledger's messages, as a dispatcher last found them.

Times are those of the database's clock, so that different machines agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, select, update

from airflow_delay_provider.brokers.ledger.dialect import database_now_ms, upsert_into
from airflow_delay_provider.brokers.ledger.journal import storable
from airflow_delay_provider.brokers.ledger.records import AnyRow
from airflow_delay_provider.brokers.ledger.tables import broker, message_count
from airflow_delay_provider.brokers.port import TopologyIssue
from airflow_delay_provider.domain.clock import ONE_MS, from_ms

#: A status that is older says nothing about now: no dispatcher checks the broker any more.
STALE_AFTER = timedelta(seconds=30)
#: Connections that no dispatcher has checked for so long are forgotten.
KEPT = timedelta(days=1)
#: Longer descriptions and errors are cut.
MAX_LENGTH = 500
_ROW = broker.c


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerStatus:
    """One broker, as it was found last."""

    conn_id: str
    checked_at: datetime
    #: How long ago that was.
    age: timedelta
    reachable: bool
    #: One line about the broker, from the last check that succeeded.
    description: str | None
    #: Why the last check failed; None if it did not.
    error: str | None
    #: None: never, or the broker needs no topology.
    topology_verified_at: datetime | None
    topology_issues: tuple[TopologyIssue, ...]
    #: The broker's clock minus the dispatcher's clock; None if it is unknown.
    clock_skew: timedelta | None
    skew_measured_at: datetime | None

    @property
    def is_stale(self) -> bool:
        """Whether no dispatcher checks this broker any more."""
        return self.age >= STALE_AFTER


def destinations(connection: Connection) -> list[str]:
    """Return the connections that the messages of this ledger go to."""
    counted = message_count.c
    query = select(counted.destination).where(counted.destination != "", counted.n > 0).distinct()
    return list(connection.execute(query.order_by(counted.destination)).scalars())


def needs_check(connection: Connection, conn_id: str, *, since: timedelta) -> bool:
    """Whether no dispatcher has checked a broker for this long."""
    recent = database_now_ms(connection) - since // ONE_MS
    query = select(_ROW.conn_id).where(_ROW.conn_id == conn_id, _ROW.checked_at_ms > recent)
    return connection.execute(query).first() is None


def needs_verification(connection: Connection, conn_id: str, *, since: timedelta) -> bool:
    """Whether no dispatcher has verified the topology of a broker for this long."""
    recent = database_now_ms(connection) - since // ONE_MS
    query = select(_ROW.conn_id).where(_ROW.conn_id == conn_id, _ROW.topology_verified_at_ms > recent)
    return connection.execute(query).first() is None


def write_reached(connection: Connection, conn_id: str, *, description: str) -> None:
    """Write that a broker has answered."""
    now_ms = database_now_ms(connection)
    found = {"checked_at_ms": now_ms, "reachable": True, "description": _short(description), "error": None}
    _write(connection, conn_id, found)


def write_skew(connection: Connection, conn_id: str, skew: timedelta) -> None:
    """Write how far the clock of a broker that was checked before is ahead."""
    measured = {"clock_skew_ms": round(skew / ONE_MS), "skew_measured_at_ms": database_now_ms(connection)}
    connection.execute(update(broker).where(_ROW.conn_id == conn_id).values(measured))


def write_failed(connection: Connection, conn_id: str, *, error: str) -> None:
    """Write that a broker could not be checked; what was known about it stays."""
    now_ms = database_now_ms(connection)
    _write(connection, conn_id, {"checked_at_ms": now_ms, "reachable": False, "error": _short(error)})


def write_topology(connection: Connection, conn_id: str, issues: Sequence[TopologyIssue]) -> None:
    """Write what verifying the topology of a broker that was checked before has found."""
    found = [{"text": _short(issue.text), "is_problem": issue.is_problem} for issue in issues]
    connection.execute(
        update(broker)
        .where(_ROW.conn_id == conn_id)
        .values(topology_verified_at_ms=database_now_ms(connection), topology_issues=found)
    )


def forget_old(connection: Connection) -> None:
    """Delete what is known of connections that no dispatcher checks any more."""
    connection.execute(delete(broker).where(_ROW.checked_at_ms < database_now_ms(connection) - KEPT // ONE_MS))


def read_all(connection: Connection) -> list[BrokerStatus]:
    """Return all brokers that dispatchers have checked, by name."""
    query = select(broker, database_now_ms(connection).label("now_ms")).order_by(_ROW.conn_id)
    return [_status_of(row) for row in connection.execute(query)]


def _write(connection: Connection, conn_id: str, found: dict[str, object]) -> None:
    statement = upsert_into(connection.dialect.name, broker).values(conn_id=conn_id, topology_issues=[], **found)
    connection.execute(statement.on_conflict_do_update(index_elements=["conn_id"], set_=found))


def _status_of(row: AnyRow) -> BrokerStatus:
    return BrokerStatus(
        conn_id=row.conn_id,
        checked_at=from_ms(row.checked_at_ms),
        age=timedelta(milliseconds=row.now_ms - row.checked_at_ms),
        reachable=row.reachable,
        description=row.description,
        error=row.error,
        topology_verified_at=None if row.topology_verified_at_ms is None else from_ms(row.topology_verified_at_ms),
        topology_issues=tuple(TopologyIssue(**issue) for issue in row.topology_issues),
        clock_skew=None if row.clock_skew_ms is None else timedelta(milliseconds=row.clock_skew_ms),
        skew_measured_at=None if row.skew_measured_at_ms is None else from_ms(row.skew_measured_at_ms),
    )


def _short(text: str) -> str:
    return storable(text)[:MAX_LENGTH]
