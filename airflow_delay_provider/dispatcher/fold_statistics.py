"""Fold the journal of the ledger into figures, for pages and APIs that must not count messages."""

from __future__ import annotations

from datetime import timedelta

from airflow_delay_provider.brokers.ledger import fold
from airflow_delay_provider.dispatcher.loop import Context

#: How far figures lag behind the journal.
INTERVAL = timedelta(seconds=2)
#: Most entries in one transaction.
PAGE = 1000
PRUNE_INTERVAL = timedelta(hours=1)


class FoldStatistics:
    """Counts journal entries page after page. Of several dispatchers, one at a time counts a page."""

    name = "fold_statistics"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sampled_ms: int | None = None
        self._prune_at_ms = 0

    def run_once(self) -> float:
        """Fold one page; sample the number of scheduled messages in each minute."""
        ledger, now_ms = self._context.ledger, self._context.now_ms()
        minute_ms = fold.start_of(now_ms, fold.MINUTE)
        if minute_ms != self._sampled_ms:
            ledger.transact(fold.sample_depth, now_ms=now_ms)
            self._sampled_ms = minute_ms
        folded = ledger.transact(fold.fold, PAGE)
        if folded == PAGE:
            return 0.0
        if now_ms >= self._prune_at_ms:
            ledger.transact(fold.prune, now_ms=now_ms)
            self._prune_at_ms = now_ms + int(PRUNE_INTERVAL.total_seconds() * 1000)
        return INTERVAL.total_seconds()
