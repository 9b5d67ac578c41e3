"""The ledgers that the API reads, and the brokers that it changes messages with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from threading import Lock
from typing import Annotated

from fastapi import Depends, HTTPException, Query, Request

from airflow_delay_provider.api.models import Text
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED
from airflow_delay_provider.domain.arguments import Hold, Limits
from airflow_delay_provider.domain.clock import Clock, floor_ms
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.hooks.delay import DelayHook

log = logging.getLogger(__name__)

#: After this time a connection is read again, so that changes need no restart.
REOPEN_AFTER = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLedger:
    """The ledger of a connection."""

    conn_id: str
    ledger: Ledger
    clock: Clock
    limits: Limits
    #: Selects the messages of the connection; None selects all messages of the ledger.
    destination: str | None
    opened_at: float
    #: The broker holds the messages of the connection; the ledger has those that a dispatcher has copied.
    is_copy: bool = False

    def now(self) -> datetime:
        """Return the time of its clock."""
        return self.clock.now()

    def now_ms(self) -> int:
        """Return the same in milliseconds."""
        return floor_ms(self.clock.now())

    def connection_of(self, destination: str | None) -> str:
        """Return the connection of a message."""
        return self.conn_id if destination is None else destination

    def destination_of(self, connection: str | None) -> str | None:
        """Return what selects the messages of a connection in this ledger; None selects all."""
        if connection is None:
            return self.destination
        if self.destination not in (None, connection):
            raise HTTPException(404, f"The ledger of {self.conn_id!r} does not list connection {connection!r} here.")
        return EMBEDDED if connection == self.conn_id and self.destination is None else connection


class OpenLedgers:
    """Opens the ledger of each connection on first use; threads share it."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open: dict[str, OpenLedger] = {}
        self._lock = Lock()

    def get(self, conn_id: str) -> OpenLedger:
        """Return the ledger of a connection; it connects on the first read."""
        with self._lock:
            known = self._open.get(conn_id)
            if known is not None and self._monotonic() - known.opened_at < REOPEN_AFTER.total_seconds():
                return known
            self._open[conn_id] = fresh = self._open_ledger(conn_id)
        if known is not None:
            # Requests that are reading it keep their database connection until they are done.
            known.ledger.close()
        return fresh

    def close(self) -> None:
        """Close all ledgers."""
        with self._lock:
            for opened in self._open.values():
                opened.ledger.close()
            self._open.clear()

    def _open_ledger(self, conn_id: str) -> OpenLedger:
        hook = DelayHook(conn_id)
        broker = hook.get_conn()
        return OpenLedger(
            conn_id=conn_id,
            ledger=hook.get_ledger(),
            clock=broker.clock,
            limits=broker.limits,
            destination=hook.get_listed_destination(),
            is_copy=broker.ledger is None,
            opened_at=self._monotonic(),
        )


def find_ledger(request: Request, conn_id: str | None) -> OpenLedger:
    """Return the ledger of a connection; raise the same 404 for every reason, to reveal no connections."""
    ledgers: OpenLedgers = request.app.state.ledgers
    wanted = conn_id or DEFAULT_CONN_ID
    try:
        return ledgers.get(wanted)
    except ConfigurationError as error:
        if wanted == DEFAULT_CONN_ID:
            raise
        log.warning("Cannot open the ledger of a connection: %s", error)
        raise HTTPException(
            404,
            f"Connection {wanted!r} cannot be used here: it is not defined, has another type or a wrong setting, or its"
            " client library is not installed. The log of the API server says which.",
        ) from error


def _ledger_of_request(
    request: Request,
    conn_id: Annotated[
        Text | None, Query(description="List the ledger of this connection; by default the configured ledger.")
    ] = None,
) -> OpenLedger:
    return find_ledger(request, conn_id)


#: The ledger that the request names.
RequestedLedger = Annotated[OpenLedger, Depends(_ledger_of_request)]


@contextmanager
def open_hook(conn_id: str, *, hold: Hold | str | None = None) -> Iterator[DelayHook]:
    """Open a broker for one request: its client belongs to one thread."""
    hook = DelayHook(conn_id, hold=hold)
    try:
        yield hook
    finally:
        hook.close()
