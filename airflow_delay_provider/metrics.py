"""Metrics of this package, sent through Airflow's own metrics (StatsD, OpenTelemetry, Datadog)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.domain.exceptions import DelayError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.port import Broker, Receipt
    from airflow_delay_provider.domain.arguments import OnConflict
    from airflow_delay_provider.domain.message import Message

log = logging.getLogger(__name__)


class AirflowMetrics:
    """Counts messages and measures lateness; also an observer of the dispatcher.

    A metric that cannot be sent is logged and never raises.
    """

    def scheduled(self, count: int, *, channel: str | None = None) -> None:
        """Count messages that the broker confirmed: ``delay.scheduled``."""
        if count:
            _emit("incr", "delay.scheduled", count, channel=channel)

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Iterable[float]) -> None:
        """Count dispatched messages and record their lateness: ``delay.dispatched``, ``delay.lateness``."""
        for channel, count in by_channel.items():
            _emit("incr", "delay.dispatched", count, channel=channel)
        for late in lateness_ms:
            _emit("timing", "delay.lateness", late)

    def failed(self, kind: str) -> None:
        """Count an error by its class or by the dispatcher loop that raised it: ``delay.errors``."""
        _emit("incr", "delay.errors", 1, kind=kind)


def schedule_and_count(broker: Broker, messages: Sequence[Message], *, on_conflict: OnConflict) -> list[Receipt]:
    """Schedule messages and count those that are new, also if the broker confirms only some of them."""
    try:
        receipts = broker.schedule(messages, on_conflict=on_conflict)
    except DelayError as error:
        # A broker that knows ids does not say which of the others are new.
        unconfirmed = set(error.unconfirmed)
        if unconfirmed and not broker.knows_ids:
            _count(message for message in messages if message.id not in unconfirmed)
        raise
    count_confirmed(zip(messages, receipts, strict=True))
    return receipts


def count_confirmed(confirmed: Iterable[tuple[Message, Receipt]]) -> None:
    """Count newly scheduled messages by channel."""
    _count(message for message, receipt in confirmed if receipt.outcome != "kept")


def _count(new: Iterable[Message]) -> None:
    for channel, count in Counter(message.channel for message in new).items():
        AirflowMetrics().scheduled(count, channel=channel)


def connect_metrics() -> None:
    """Connect Airflow's metrics to the configured backend, in a process that Airflow did not start."""
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
        # An error of the metrics backend must not fail the work that is measured.
        log.warning("Cannot send the metric %s", name, exc_info=True)
