"""Free messages that a dead dispatcher has claimed."""

from __future__ import annotations

import logging

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.dispatcher.context import Context

log = logging.getLogger(__name__)


class RescueStale:
    """Ends claims whose time has passed."""

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
