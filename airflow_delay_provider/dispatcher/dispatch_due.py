"""Due messages go into the channels of the ledger's own database."""

from __future__ import annotations

from collections import Counter

from airflow_delay_provider.dispatcher.context import Context
from airflow_delay_provider.ledger import delivery


class DispatchDue:
    """Sleeps until the next message is due, then moves all that are due in one transaction.

    Nothing is taken ahead of time: a message can be cancelled until it is due, and a dispatcher that dies holds none.
    """

    name = "dispatch_due"

    def __init__(self, context: Context) -> None:
        self._context = context

    def run_once(self) -> float:
        """Deliver one batch of what is due."""
        context = self._context
        limit, pause = context.look()
        if limit < 1:
            return pause
        now_ms = context.now_ms()
        rows = context.ledger.transact(lambda connection: delivery.deliver_due(connection, now_ms=now_ms, limit=limit))
        context.note_dispatched(Counter(row.channel for row in rows), [now_ms - row.deliver_at_ms for row in rows])
        # A due message that was not taken is in the hands of another dispatcher or of a user who changes it.
        return 0.0 if rows else context.poll_seconds
