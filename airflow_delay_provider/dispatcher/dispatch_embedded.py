"""Dispatch due messages to the embedded channels, which are tables of the ledger's own database."""

from __future__ import annotations

from collections import Counter

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.dispatcher.loop import Context


class DispatchEmbedded:
    """Sleeps until the next message is due, then moves a batch of due messages in one transaction.

    No message is claimed ahead of time: it can be cancelled until it is due, and a dead dispatcher holds none.
    """

    name = "dispatch_embedded"

    def __init__(self, context: Context) -> None:
        self._context = context
        self.notice_interval = context.poll_seconds

    def run_once(self) -> float:
        """Dispatch one batch."""
        context = self._context
        limit, pause = context.embedded_allowance()
        if limit < 1:
            return pause
        now_ms = context.now_ms()
        rows = context.ledger.transact(delivery.deliver_due, now_ms=now_ms, limit=limit)
        context.count_dispatched(Counter(row.channel for row in rows), [now_ms - row.deliver_at_ms for row in rows])
        # Another transaction has locked a due message that was not taken: another dispatcher, or a user who changes it.
        return 0.0 if rows else context.poll_seconds
