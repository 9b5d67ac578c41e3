"""Messages that a dead dispatcher was sending wait again."""

from __future__ import annotations

import logging

from airflow_delay_provider.dispatcher.context import Context
from airflow_delay_provider.ledger import delivery

log = logging.getLogger(__name__)


class RescueStale:
    """Ends claims whose time is over."""

    name = "rescue_stale"

    def __init__(self, context: Context) -> None:
        self._context = context

    def run_once(self) -> float:
        """Rescue one batch."""
        config = self._context.config
        now_ms = self._context.now_ms()
        rescued = self._context.ledger.transact(
            lambda connection: delivery.rescue_stale(connection, now_ms=now_ms, limit=config.batch)
        )
        if rescued:
            log.warning("%d messages were claimed by a dispatcher that did not finish; they wait again", rescued)
        return 0.0 if rescued == config.batch else config.rescue_interval.total_seconds()
