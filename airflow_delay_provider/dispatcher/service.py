"""The dispatcher: its loops, started, watched and stopped together."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.heartbeats import INTERVAL
from airflow_delay_provider.brokers.ledger.notices import Notices, open_notices
from airflow_delay_provider.dispatcher.broker_connection import OpenBroker
from airflow_delay_provider.dispatcher.check_brokers import CheckBrokers
from airflow_delay_provider.dispatcher.dispatch_embedded import DispatchEmbedded
from airflow_delay_provider.dispatcher.dispatch_kafka import DispatchKafka
from airflow_delay_provider.dispatcher.dispatch_to_brokers import DispatchToBrokers
from airflow_delay_provider.dispatcher.fold_statistics import FoldStatistics
from airflow_delay_provider.dispatcher.gauges import DispatcherGauges
from airflow_delay_provider.dispatcher.housekeeping import Prune, RescueStale
from airflow_delay_provider.dispatcher.loop import Context, Loop, LoopThread, TokenBucket
from airflow_delay_provider.dispatcher.monitoring import HealthServer, Observer, PrometheusObserver
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.project_journal import ProjectJournal
from airflow_delay_provider.dispatcher.write_heartbeat import WriteHeartbeat
from airflow_delay_provider.domain.clock import Clock, SystemClock
from airflow_delay_provider.domain.exceptions import DelayError

log = logging.getLogger(__name__)

#: Time for all loops together to end.
STOP_SECONDS = 30.0
#: Between two checks for a signal.
LOOK_SECONDS = 0.1


class Dispatcher:
    """Serves one ledger. Any number of dispatchers may serve the same one."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        open_broker: OpenBroker,
        config: DispatcherConfig | None = None,
        clock: Clock | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config = config or DispatcherConfig()
        self._prometheus = PrometheusObserver()
        limit = self.config.rate_limit
        self._context = Context(
            ledger=ledger,
            clock=clock or SystemClock(),
            config=self.config,
            observers=[self._prometheus, *observers],
            bucket=None if limit is None else TokenBucket(limit),
            is_announced=lambda: self._notices is not None and self._notices.is_listening,
        )
        self._notices: Notices | None = None
        self._open_broker = open_broker
        self._stop = threading.Event()
        self._threads: dict[str, LoopThread] = {}
        self._prometheus.registry.register(DispatcherGauges(self._context, lambda: list(self._threads.values())))
        self._health_server: HealthServer | None = None
        self._heartbeat = WriteHeartbeat(
            self._context, lambda: {name: thread.health for name, thread in list(self._threads.items())}
        )

    @property
    def health_url(self) -> str | None:
        """The address of ``/health`` and ``/metrics``."""
        return self._health_server.url if self._health_server else None

    def start(self) -> None:
        """Start all loops; raises when the ledger cannot be used at all."""
        ledger = self._context.ledger
        with ledger.read():
            log.info("Dispatcher %s serves the ledger at %s", self.config.owner, ledger.name)
        if self.config.health_port is not None:
            reports = {"/live": self.liveness, "/ready": self.readiness, "/health": self.health}
            self._health_server = HealthServer(
                self.config.health_host, self.config.health_port, reports=reports, metrics=self.metrics
            )
            self._health_server.start()
            log.info("Health and metrics at %s/health, /live, /ready and /metrics", self.health_url)
        loops: list[Loop] = [
            DispatchEmbedded(self._context),
            RescueStale(self._context),
            Prune(self._context),
            ServeDestinations(self),
            FoldStatistics(self._context),
            CheckBrokers(self._context, self._open_broker),
            *(ProjectJournal(self._context, each, self._open_broker) for each in dict.fromkeys(self.config.index)),
            *(DispatchKafka(self._context, each, self._open_broker) for each in dict.fromkeys(self.config.kafka)),
            self._heartbeat,
        ]
        for loop in loops:
            self._start_loop(loop)
        self._notices = open_notices(ledger, on_notice=self._wake, interval=self._context.poll_seconds)
        if self._notices is not None:
            self._notices.start()

    def stop(self) -> bool:
        """Let every loop finish its current run and close, and return whether all did in time."""
        self._stop.set()
        if self._notices is not None:
            self._notices.stop()
        self._wake()
        deadline = time.monotonic() + STOP_SECONDS
        unfinished = [
            name
            for name, thread in list(self._threads.items())
            if not thread.join(max(0.0, deadline - time.monotonic()))
        ]
        if self._health_server is not None:
            self._health_server.stop()
        try:
            self._heartbeat.mark_stopped()
        except DelayError as error:
            log.warning("Could not write to the ledger that this dispatcher has stopped: %s", error)
        self._context.ledger.close()
        log.info("Dispatcher %s stopped; unfinished: %s", self.config.owner, ", ".join(unfinished) or "nothing")
        return not unfinished

    def run_until_signalled(self) -> bool:
        """Serve until SIGTERM or SIGINT, then stop gracefully."""
        signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not an event: a signal handler that interrupts the thread holding its lock would wait forever.
            signal.signal(number, lambda number, _frame: signals.append(number))
        self.start()
        while not signals:
            time.sleep(LOOK_SECONDS)
        return self.stop()

    def serve_new_destinations(self) -> None:
        """Start a loop for each broker that has scheduled messages and no loop yet; the loop opens the broker."""
        for name, thread in list(self._threads.items()):
            if thread.has_ended:
                del self._threads[name]
        with self._context.ledger.read() as connection:
            destinations = listing.waiting_destinations(connection)
        for destination in destinations:
            if f"dispatch_to_brokers:{destination}" not in self._threads:
                self._start_loop(DispatchToBrokers(self._context, destination, self._open_broker))

    def liveness(self) -> dict[str, Any]:
        """Return what ``/live`` shows: it is not well if only a restart can help, because a loop is dead or hung."""
        dead = [name for name, thread in list(self._threads.items()) if not thread.is_alive]
        return {"well": not dead, "loops": dead}

    def readiness(self) -> dict[str, Any]:
        """Return what ``/ready`` shows: well while the loops of the ledger work.

        Loops of single connections do not count: if one fails, the others are served.
        """
        of_ledger = {name: thread.health for name, thread in list(self._threads.items()) if ":" not in name}
        waiting = [name for name, health in of_ledger.items() if not (health.has_run and health.well)]
        return {"well": self._heartbeat.name in of_ledger and not waiting, "loops": waiting}

    def health(self) -> dict[str, Any]:
        """Return what ``/health`` shows: well only if every loop is."""
        loops = {name: thread.health.as_dict() for name, thread in list(self._threads.items())}
        return {
            "well": all(loop["well"] for loop in loops.values()),
            "owner": self.config.owner,
            "ledger": self._context.ledger.name,
            "loops": loops,
        }

    def metrics(self) -> bytes:
        """Return what ``/metrics`` shows."""
        return self._prometheus.render()

    def _wake(self) -> None:
        for thread in list(self._threads.values()):
            thread.wake()

    def _start_loop(self, loop: Loop) -> None:
        backoff = self.config.backoff
        if loop is self._heartbeat and backoff.cap > INTERVAL:
            # After an outage of the database, a dispatcher must not look gone because it waits for its next attempt.
            backoff = replace(backoff, initial=min(backoff.initial, INTERVAL), cap=INTERVAL)
        thread = LoopThread(loop, stop=self._stop, backoff=backoff, observers=self._context.observers)
        self._threads[loop.name] = thread
        self._prometheus.show(loop.name)
        thread.start()


class ServeDestinations:
    """Starts a loop for each broker that gets its first ledger-held message."""

    name = "serve_destinations"

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def run_once(self) -> float:
        """Check once."""
        self._dispatcher.serve_new_destinations()
        return 1.0
