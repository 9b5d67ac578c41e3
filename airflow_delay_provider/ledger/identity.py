"""Which ledger this is, and whether this process may use it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select

from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.ledger.heartbeats import read_dispatchers
from airflow_delay_provider.ledger.machine import Machine
from airflow_delay_provider.ledger.tables import ledger_identity

REMEDY = (
    "set [delay] ledger_url to a PostgreSQL database that all machines reach, such as"
    " postgresql+psycopg://user:password@host/delay, and run `airflow delay db migrate`"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerIdentity:
    """One ledger among all."""

    id: str
    #: Where its tables were made.
    host: str
    created_at: datetime


def read_identity(connection: Connection) -> LedgerIdentity:
    """Return which ledger this is."""
    row = connection.execute(select(ledger_identity)).one()
    return LedgerIdentity(id=row.id, host=row.host, created_at=from_ms(row.created_at_ms))


def require_one_machine(connection: Connection, name: str, machine: Machine) -> None:
    """Refuse a SQLite file that a dispatcher on another machine serves.

    The file lies on a network file system then, where SQLite promises nothing: writes of one machine may stay unseen by
    the other. A heartbeat from before this machine was started says nothing, since it may be this machine's own.
    """
    for dispatcher in read_dispatchers(connection):
        elsewhere = None not in (dispatcher.boot_id, machine.boot_id) and dispatcher.boot_id != machine.boot_id
        if elsewhere and dispatcher.is_alive and floor_ms(dispatcher.seen_at) > machine.booted_at_ms:
            raise ConfigurationError(
                f"ledger_url: {name} is a SQLite file that dispatcher {dispatcher.owner} on the machine"
                f" {dispatcher.host!r} serves, and this is {machine.host!r}; SQLite works on one machine only: {REMEDY}"
            )
