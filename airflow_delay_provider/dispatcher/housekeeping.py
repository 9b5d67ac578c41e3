"""The loops that keep the ledger clean: they free claims of dead dispatchers, and delete old messages."""

from __future__ import annotations

import logging

from airflow_delay_provider.brokers.ledger import delivery, pruning
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.domain.clock import floor_ms

log = logging.getLogger(__name__)


class RescueStale:
    """Frees messages that a dead dispatcher has claimed: their claims have run out."""

    name = "rescue_stale"

    def __init__(self, context: Context) -> None:
        self._context = context

    def run_once(self) -> float:
        """Rescue one batch."""
        config = self._context.config
        now_ms = self._context.now_ms()
        rescued = self._context.ledger.transact(delivery.rescue_stale, now_ms=now_ms, limit=config.batch)
        if rescued:
            log.warning("Freed %d messages that a dispatcher had claimed and not sent in time", rescued)
        return 0.0 if rescued == config.batch else config.rescue_interval.total_seconds()


class Prune:
    """Deletes messages that ended longer ago than the retention.

    It looks for them page by page without locks and deletes those of a page, so that other writers wait only briefly.
    """

    name = "prune"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._place = pruning.Place()

    def run_once(self) -> float:
        """Read one page, and delete what is old."""
        config, ledger = self._context.config, self._context.ledger
        before_ms = floor_ms(self._context.clock.now() - config.retention)
        with ledger.read() as connection:
            found = pruning.find_old(connection, self._place, before_ms=before_ms, limit=config.batch)
        if found.seqs and (pruned := ledger.transact(pruning.prune, found.state, found.seqs, before_ms=before_ms)):
            log.info("Deleted %d messages that ended more than %s ago", pruned, config.retention)
        self._place = found.next or pruning.Place()
        return config.prune_interval.total_seconds() if found.next is None else 0.0
