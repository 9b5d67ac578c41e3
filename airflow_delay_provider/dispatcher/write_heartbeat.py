"""Write to the ledger that this dispatcher runs, and the state of its loops."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from sqlalchemy import Connection

from airflow_delay_provider.brokers.ledger import heartbeats
from airflow_delay_provider.brokers.ledger.heartbeats import this_machine
from airflow_delay_provider.dispatcher.loop import Context, LoopHealth

_DISTRIBUTION = "airflow-delay-provider"
#: Longer errors are cut.
MAX_ERROR_LENGTH = 500


class WriteHeartbeat:
    """Writes one row every few seconds from its own thread, so that a stalled loop is reported as such."""

    name = "heartbeat"

    def __init__(self, context: Context, loops: Callable[[], Mapping[str, LoopHealth]]) -> None:
        self._context = context
        self._loops = loops
        self._version = installed_version()
        self._is_first = True

    def run_once(self) -> float:
        """Write one heartbeat."""
        self._context.ledger.transact(self._beat)
        self._is_first = False
        return heartbeats.INTERVAL.total_seconds()

    def mark_stopped(self) -> None:
        """Write that the dispatcher has stopped cleanly."""
        self._context.ledger.transact(heartbeats.mark_stopped, self._context.config.owner)

    def _beat(self, connection: Connection) -> None:
        config = self._context.config
        if self._is_first:
            heartbeats.forget_gone(connection)
        heartbeats.beat(
            connection,
            heartbeats.Heartbeat(
                owner=config.owner,
                machine=this_machine(),
                pid=os.getpid(),
                version=self._version,
                index_connections=config.index,
                kafka_connections=config.kafka,
                loops={name: _report(health) for name, health in self._loops().items() if name != self.name},
                clock_skew=heartbeats.measure_clock_skew(connection, self._context.clock),
            ),
        )


def _report(health: LoopHealth) -> dict[str, Any]:
    ago, error = health.seconds_since_success, health.error or health.trouble
    return {
        "well": health.well,
        "succeeded_ms_ago": None if ago is None else int(ago * 1000),
        "failures": health.failures,
        "error": None if error is None else error[:MAX_ERROR_LENGTH],
    }


def installed_version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
