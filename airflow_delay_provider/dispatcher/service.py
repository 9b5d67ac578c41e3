"""The dispatcher: its loops, started, watched and stopped together."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from airflow_delay_provider.brokers.base import Broker
from airflow_delay_provider.dispatcher.climb_ladder import ClimbLadder
from airflow_delay_provider.dispatcher.config import DispatcherConfig
from airflow_delay_provider.dispatcher.context import Context
from airflow_delay_provider.dispatcher.dispatch_away import DispatchAway
from airflow_delay_provider.dispatcher.dispatch_due import DispatchDue
from airflow_delay_provider.dispatcher.health import HealthServer
from airflow_delay_provider.dispatcher.loop import Loop, LoopThread
from airflow_delay_provider.dispatcher.observing import Observer, PrometheusObserver
from airflow_delay_provider.dispatcher.project_journal import ProjectJournal
from airflow_delay_provider.dispatcher.prune import Prune
from airflow_delay_provider.dispatcher.rate import TokenBucket
from airflow_delay_provider.dispatcher.rescue_stale import RescueStale
from airflow_delay_provider.domain.clock import Clock, SystemClock
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.exceptions import DelayError
from airflow_delay_provider.ledger import counts, delivery
from airflow_delay_provider.ledger.database import Ledger

log = logging.getLogger(__name__)

#: From the connection id of another broker to the broker.
OpenBroker = Callable[[str], Broker]

#: What all loops together get to end.
STOP_SECONDS = 30.0
#: Between two looks for a signal.
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
        )
        self._open_broker = open_broker
        self._opening = threading.Lock()
        self._stop = threading.Event()
        self._threads: dict[str, LoopThread] = {}
        self._brokers: list[Broker] = []
        self._health_server: HealthServer | None = None

    @property
    def health_url(self) -> str | None:
        """Where ``/health`` and ``/metrics`` answer."""
        return self._health_server.url if self._health_server else None

    def start(self) -> None:
        """Start all loops; raises when the ledger cannot be used at all."""
        ledger = self._context.ledger
        with ledger.read():
            log.info("Dispatcher %s serves the ledger at %s", self.config.owner, ledger.name)
        if self.config.health_port is not None:
            self._health_server = HealthServer(
                self.config.health_host, self.config.health_port, health=self.health, metrics=self.metrics
            )
            self._health_server.start()
            log.info("Health and metrics at %s/health and /metrics", self.health_url)
        loops: list[Loop] = [
            DispatchDue(self._context),
            RescueStale(self._context),
            Prune(self._context),
            ServeDestinations(self),
            *(ProjectJournal(self._context, conn_id, self._open) for conn_id in dict.fromkeys(self.config.project)),
            *(ClimbLadder(self._context, conn_id, self._open) for conn_id in dict.fromkeys(self.config.climb)),
        ]
        for loop in loops:
            self._begin(loop)

    def stop(self) -> bool:
        """Let every loop finish its current run and close, and return whether all did in time."""
        self._stop.set()
        deadline = time.monotonic() + STOP_SECONDS
        unfinished = [
            name
            for name, thread in list(self._threads.items())
            if not thread.join(max(0.0, deadline - time.monotonic()))
        ]
        if self._health_server is not None:
            self._health_server.stop()
        for broker in self._brokers:
            try:
                broker.close()
            except Exception:
                # What it has confirmed is marked, and the rest waits in the ledger.
                log.warning("A broker did not close cleanly", exc_info=True)
        self._context.ledger.close()
        log.info("Dispatcher %s stopped; unfinished: %s", self.config.owner, ", ".join(unfinished) or "nothing")
        return not unfinished

    def run_until_signalled(self) -> bool:
        """Serve until SIGTERM or SIGINT, then stop gracefully."""
        signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            # An event would not do: a handler that interrupts whoever holds its lock waits for that for ever.
            signal.signal(number, lambda number, _frame: signals.append(number))
        self.start()
        while not signals:
            time.sleep(LOOK_SECONDS)
        return self.stop()

    def serve_new_destinations(self) -> None:
        """Start a loop for every broker that messages wait for and that has none yet."""
        with self._context.ledger.read() as connection:
            destinations = counts.waiting_destinations(connection)
        for destination in destinations:
            if f"dispatch_away:{destination}" not in self._threads:
                broker = self._open(destination)
                self._brokers.append(broker)
                self._begin(DispatchAway(self._context, destination, broker))

    def health(self) -> dict[str, Any]:
        """Return what ``/health`` shows."""
        loops = {name: thread.health.as_dict() for name, thread in list(self._threads.items())}
        return {
            "well": all(loop["well"] for loop in loops.values()),
            "owner": self.config.owner,
            "ledger": self._context.ledger.name,
            "loops": loops,
        }

    def metrics(self) -> bytes:
        """Return what ``/metrics`` shows."""
        try:
            with self._context.ledger.read() as connection:
                self._prometheus.scheduled.set(counts.by_state(connection)[State.SCHEDULED])
                due_ms = delivery.next_due_ms(connection)
            overdue_ms = 0 if due_ms is None else max(0, self._context.now_ms() - due_ms)
            self._prometheus.overdue.set(overdue_ms / 1000)
        except DelayError:
            log.debug("The ledger cannot be asked for metrics now", exc_info=True)
        return self._prometheus.render()

    def _open(self, conn_id: str) -> Broker:
        # Looking up a connection switches where this process looks, so loops do it one after the other.
        with self._opening:
            return self._open_broker(conn_id)

    def _begin(self, loop: Loop) -> None:
        thread = LoopThread(loop, stop=self._stop, backoff=self.config.backoff, observers=self._context.observers)
        self._threads[loop.name] = thread
        thread.start()


class ServeDestinations:
    """Notices brokers that messages begin to wait for."""

    name = "serve_destinations"

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def run_once(self) -> float:
        """Look once."""
        self._dispatcher.serve_new_destinations()
        return 1.0
