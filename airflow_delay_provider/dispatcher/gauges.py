"""The numbers of ``/metrics`` that are read when Prometheus asks: the ledger, the loops, the version."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from airflow_delay_provider.brokers.ledger import heartbeats, listing, overdue
from airflow_delay_provider.dispatcher.dispatch_to_brokers import DispatchToBrokers
from airflow_delay_provider.dispatcher.loop import Context, LoopThread
from airflow_delay_provider.dispatcher.write_heartbeat import installed_version
from airflow_delay_provider.domain.arguments import Hold
from airflow_delay_provider.domain.exceptions import DelayError
from airflow_delay_provider.domain.lifecycle import State

log = logging.getLogger(__name__)


class DispatcherGauges(Collector):
    """Computes all gauges for each request, so that none shows what was true before."""

    def __init__(self, context: Context, threads: Callable[[], Sequence[LoopThread]]) -> None:
        self._context = context
        self._threads = threads
        self._version = installed_version()

    def collect(self) -> Iterable[Metric]:
        """Return the gauges; those of the ledger only if it can be read."""
        build = {"version": self._version, "python": platform.python_version()}
        yield InfoMetricFamily("delay_build", "The version of this dispatcher", value=build)
        yield from self._of_loops()
        try:
            of_ledger = self._of_ledger()
        except DelayError:
            log.debug("The ledger could not be read for metrics", exc_info=True)
            of_ledger = []
        yield GaugeMetricFamily(
            "delay_ledger_up", "Whether the ledger could be read for this request", value=float(bool(of_ledger))
        )
        yield from of_ledger

    def _of_loops(self) -> list[Metric]:
        healthy = GaugeMetricFamily(
            "delay_loop_healthy", "Whether a loop works; /health has the reason if it does not", labels=["loop"]
        )
        succeeded = GaugeMetricFamily(
            "delay_loop_last_success_timestamp_seconds",
            "When the last successful run of a loop ended; missing before the first one",
            labels=["loop"],
        )
        held = GaugeMetricFamily(
            "delay_held_channels",
            "Channels to which messages cannot be sent; /health has the reasons",
            labels=["loop"],
        )
        for thread in self._threads():
            name, health = [thread.loop.name], thread.health
            healthy.add_metric(name, float(health.well))
            if (ago := health.seconds_since_success) is not None:
                succeeded.add_metric(name, time.time() - ago)
            if isinstance(thread.loop, DispatchToBrokers):
                held.add_metric(name, len(health.troubles()))
        return [healthy, succeeded, held]

    def _of_ledger(self) -> list[Metric]:
        with self._context.ledger.read() as connection:
            counts = listing.count_by_state(connection)
            due_ms = overdue.first_due_ms(connection)
            alive = sum(each.is_alive for each in heartbeats.read_dispatchers(connection))
        now_ms = self._context.now_ms()
        messages = GaugeMetricFamily("delay_messages", "Messages in the ledger, by state", labels=["state"])
        for state, count in counts.items():
            messages.add_metric([state.name.lower()], count)
        late = GaugeMetricFamily(
            "delay_overdue_seconds",
            "How long the first scheduled message is overdue; a broker's messages are known from its index",
            labels=["hold"],
        )
        for hold in Hold:
            late.add_metric([hold.value], max(0, now_ms - due_ms.get(hold, now_ms)) / 1000)
        return [
            messages,
            GaugeMetricFamily("delay_scheduled", "Scheduled messages", value=counts[State.SCHEDULED]),
            late,
            GaugeMetricFamily(
                "delay_dispatchers", "Dispatchers that serve this ledger, by their heartbeats", value=alive
            ),
        ]
