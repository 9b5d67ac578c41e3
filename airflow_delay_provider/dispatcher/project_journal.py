"""Copy the journal of another broker into the ledger, so that its messages can be listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from airflow_delay_provider.brokers.ledger import projection
from airflow_delay_provider.brokers.port import NeedsDispatcher
from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection, OpenBroker
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.domain.lifecycle import JournalEntry, is_full_page

#: Most entries in one transaction.
PAGE = 1000
#: Older dispatches are listed and not measured: a journal that is read from its start is no news.
MEASURED = timedelta(minutes=5)


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
            broker = self._connection.get()
            entries = broker.read_journal(after=after, limit=PAGE)
        except Exception:
            self.close()
            raise
        if not entries:
            return interval
        position = entries[-1].position
        applied = ledger.transact(projection.project, destination, entries, after=after, position=position)
        if applied is None:
            # Another dispatcher is ahead; reading the same pages beside it does not help.
            return interval
        # What needs a dispatcher is measured by that dispatcher.
        if not isinstance(broker, NeedsDispatcher):
            self._report(applied.dispatched)
        return 0.0 if is_full_page(entries, PAGE) else interval

    def close(self) -> None:
        """Close the broker; the next run opens it again."""
        self._connection.close()

    def _report(self, dispatched: Sequence[JournalEntry]) -> None:
        """Report messages that the broker has dispatched itself, each once: when its entry is applied."""
        since = self._context.clock.now() - MEASURED
        recent = [entry for entry in dispatched if entry.at >= since]
        self._context.report_dispatched(
            Counter(entry.channel for entry in recent),
            # Clocks of brokers differ; no message is early.
            [max(0, floor_ms(entry.at) - ceil_ms(entry.deliver_at)) for entry in recent if entry.lateness is not None],
        )
