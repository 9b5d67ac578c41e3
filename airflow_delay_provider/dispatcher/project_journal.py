"""What another broker holds is followed in the ledger, through that broker's journal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from airflow_delay_provider.brokers.base import Broker
from airflow_delay_provider.dispatcher.context import Context
from airflow_delay_provider.exceptions import DelayError
from airflow_delay_provider.ledger import projection

#: Most entries in one transaction.
PAGE = 1000


class ProjectJournal:
    """Serves one connection. Of several dispatchers that do so, the first to write a page has done it.

    The broker is read outside of any transaction, by a client of this loop's own: nobody waits for a slow broker.
    """

    def __init__(self, context: Context, destination: str, open_broker: Callable[[str], Broker]) -> None:
        self.name = f"project_journal:{destination}"
        self._context = context
        self._destination = destination
        self._open_broker = open_broker
        self._broker: Broker | None = None

    def run_once(self) -> float:
        """Apply one page."""
        ledger, destination = self._context.ledger, self._destination
        interval = self._context.config.project_interval.total_seconds()
        with ledger.read() as connection:
            after = projection.position_of(connection, destination)
        try:
            entries = self._open().read_journal(after=after, limit=PAGE)
        except Exception:
            self.close()
            raise
        if not entries:
            return interval
        position = entries[-1].position
        applied = ledger.transact(
            lambda connection: projection.project(connection, destination, entries, after=after, position=position)
        )
        # Somebody else is at it, and ahead: reading the same pages beside them helps nobody.
        return 0.0 if applied and len(entries) == PAGE else interval

    def close(self) -> None:
        """Let go of the broker; the next run opens it again."""
        broker, self._broker = self._broker, None
        if broker is not None:
            with suppress(DelayError):
                broker.close()

    def _open(self) -> Broker:
        if self._broker is None:
            self._broker = self._open_broker(self._destination)
        return self._broker
