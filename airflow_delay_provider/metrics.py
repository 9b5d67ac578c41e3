"""What this package counts, sent through Airflow's own metrics (statsd, OpenTelemetry, Datadog)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

log = logging.getLogger(__name__)


class AirflowMetrics:
    """Counts messages and measures lateness; a dispatcher's observer too.

    A metric that cannot be sent is logged and breaks nothing.
    """

    def scheduled(self, count: int, *, channel: str | None = None) -> None:
        """Count messages whose waiting was confirmed: ``delay.scheduled``."""
        if count:
            _emit("incr", "delay.scheduled", count, channel=channel)

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Iterable[float]) -> None:
        """Count messages handed to their channel and how late each was: ``delay.dispatched``, ``delay.lateness``."""
        for channel, count in by_channel.items():
            _emit("incr", "delay.dispatched", count, channel=channel)
        for late in lateness_ms:
            _emit("timing", "delay.lateness", late)

    def failed(self, kind: str) -> None:
        """Count a failure by the class of its error or the loop it happened in: ``delay.errors``."""
        _emit("incr", "delay.errors", 1, kind=kind)


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
