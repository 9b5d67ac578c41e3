"""What another broker holds is followed in the ledger, through that broker's journal."""

from __future__ import annotations

from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection, OpenBroker
from airflow_delay_provider.dispatcher.context import Context
from airflow_delay_provider.ledger import projection

#: Most entries in one transaction.
PAGE = 1000


class ProjectJournal:
    """Serves one connection. Of several dispatchers that do so, the first to write a page has done it.

    The broker is read outside of any transaction, by a client of this loop's own: nobody waits for a slow broker.
    """

    def __init__(self, context: Context, destination: str, open_broker: OpenBroker) -> None:
        self.name = f"project_journal:{destination}"
        self._context = context
        self._destination = destination
        self._connection = BrokerConnection(destination, open_broker, reread=context.config.reread_interval)

    def run_once(self) -> float:
        """Apply one page."""
        ledger, destination = self._context.ledger, self._destination
        interval = self._context.config.project_interval.total_seconds()
        with ledger.read() as connection:
            after = projection.position_of(connection, destination)
        try:
            entries = self._connection.get().read_journal(after=after, limit=PAGE)
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
        self._connection.close()
