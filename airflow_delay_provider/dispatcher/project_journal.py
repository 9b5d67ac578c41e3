"""Copy the journal of another broker into the ledger, so that its messages can be listed."""

from __future__ import annotations

from airflow_delay_provider.brokers.ledger import projection
from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection, OpenBroker
from airflow_delay_provider.dispatcher.loop import Context

#: Most entries in one transaction.
PAGE = 1000


class ProjectJournal:
    """Serves one connection. Of several dispatchers that do so, the first to write a page wins.

    The loop reads the broker with its own client and outside of any transaction: a slow broker delays no other loop.
    """

    def __init__(self, context: Context, destination: str, open_broker: OpenBroker) -> None:
        self.name = f"project_journal:{destination}"
        self._context = context
        self._destination = destination
        self._connection = BrokerConnection(destination, open_broker, reread=context.config.reread_interval)

    def run_once(self) -> float:
        """Apply one page."""
        ledger, destination = self._context.ledger, self._destination
        interval = self._context.config.index_interval.total_seconds()
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
        applied = ledger.transact(projection.project, destination, entries, after=after, position=position)
        # If another dispatcher is ahead, reading the same pages beside it does not help.
        return 0.0 if applied and len(entries) == PAGE else interval

    def close(self) -> None:
        """Close the broker; the next run opens it again."""
        self._connection.close()
