"""What this package counts, sent through Airflow's own metrics (statsd, OpenTelemetry, Datadog)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger(__name__)


class AirflowMetrics:
    """Counts messages and measures lateness. A metric that cannot be sent is logged and breaks nothing."""

    def scheduled(self, count: int, *, channel: str | None = None) -> None:
        """Count messages whose waiting was confirmed: ``delay.scheduled``."""
        if count:
            _emit("incr", "delay.scheduled", count, channel=channel)

    def dispatched(self, count: int, latenesses_ms: Iterable[float] = (), *, channel: str | None = None) -> None:
        """Count messages handed to their channel and how late each was: ``delay.dispatched``, ``delay.lateness``."""
        if count:
            _emit("incr", "delay.dispatched", count, channel=channel)
        for lateness_ms in latenesses_ms:
            _emit("timing", "delay.lateness", lateness_ms, channel=channel)

    def error(self, kind: str, *, channel: str | None = None) -> None:
        """Count a failed call by the class of its error: ``delay.errors``."""
        _emit("incr", "delay.errors", 1, channel=channel, kind=kind)


def connect_metrics() -> None:
    """Point Airflow's metrics at the configured backend, in a process that Airflow did not start."""
    from airflow.sdk.configuration import conf
    from airflow.sdk.observability import stats
    from airflow.sdk.observability.metrics import stats_utils

    stats.initialize(
        factory=stats_utils.get_stats_factory(), export_legacy_names=conf.getboolean("metrics", "legacy_names_on")
    )


def _emit(how: str, name: str, value: float, **tags: str | None) -> None:
    try:
        from airflow.sdk.observability import stats

        send: Callable[..., Any] = getattr(stats, how)
        send(name, value, tags={tag: text for tag, text in tags.items() if text is not None})
    except Exception:
        # Whatever a metrics backend raises must not fail the work that is measured.
        log.warning("The metric %s could not be sent", name, exc_info=True)
