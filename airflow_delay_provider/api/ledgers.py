"""The ledgers that the web application reads, one for each connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock

from airflow_delay_provider.brokers.base import Climbed
from airflow_delay_provider.domain.clock import Clock
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.ledger.database import Ledger

#: After this time a connection is looked up again, so that a change of it needs no restart.
KEPT = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLedger:
    """A ledger to read and the clock of its messages."""

    ledger: Ledger
    clock: Clock
    #: What the connection's messages are limited to in it; None is all of them.
    destination: str | None
    #: Whether a dispatcher moves the messages that the connection's broker holds itself.
    climbed: bool
    opened_at: float


class OpenLedgers:
    """Opens the ledger of a connection on first use and keeps it; threads share it."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open: dict[str, OpenLedger] = {}
        self._lock = Lock()

    def get(self, conn_id: str) -> OpenLedger:
        """Return the ledger of a connection; it connects when it is read."""
        with self._lock:
            known = self._open.get(conn_id)
            if known is not None and self._monotonic() - known.opened_at < KEPT.total_seconds():
                return known
            self._open[conn_id] = fresh = self._open_ledger(conn_id)
        if known is not None:
            # Readers that have a connection of it keep that one to their end.
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
        return OpenLedger(
            ledger=hook.get_ledger(),
            clock=hook.get_conn().clock,
            destination=hook.get_listed_destination(),
            climbed=isinstance(hook.get_conn(), Climbed),
            opened_at=self._monotonic(),
        )
