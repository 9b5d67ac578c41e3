"""The loops that keep the ledger clean: they free claims of dead dispatchers, and delete old messages."""

from __future__ import annotations

import logging

from airflow_delay_provider.brokers.ledger import delivery, scheduling
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

    It does so in small batches, so that other writers do not wait long.
    """

    name = "prune"

    def __init__(self, context: Context) -> None:
        self._context = context

    def run_once(self) -> float:
        """Delete one batch."""
        config = self._context.config
        before_ms = floor_ms(self._context.clock.now() - config.retention)
        pruned = self._context.ledger.transact(scheduling.prune, before_ms=before_ms, limit=config.batch)
        if pruned:
            log.info("Deleted %d messages that ended more than %s ago", pruned, config.retention)
        return 0.0 if pruned == config.batch else config.prune_interval.total_seconds()
