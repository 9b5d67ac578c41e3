"""Metrics and health of the dispatcher over HTTP: ``/live``, ``/ready``, ``/health`` and ``/metrics``."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest

from airflow_delay_provider.dispatcher.options import DEFAULT_PORT
from airflow_delay_provider.domain.exceptions import ConfigurationError

#: So many ports after the default one are tried, for several dispatchers on one machine.
NEXT_PORTS = 9


class Observer(Protocol):
    """Receives what the loops did; must not raise."""

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Messages were dispatched to their channels, this late."""
        ...

    def failed(self, loop: str) -> None:
        """A run of a loop failed, or its work for one channel."""
        ...


class PrometheusObserver:
    """Counts what the loops did, for ``/metrics``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._dispatched = Counter(
            "delay_dispatched", "Messages dispatched to their channel", ["channel"], registry=self.registry
        )
        self._errors = Counter(
            "delay_errors",
            "Runs of a loop, or of its work for one channel, that failed",
            ["loop"],
            registry=self.registry,
        )
        self._lateness = Histogram(
            "delay_lateness_seconds",
            "How long after its due time a message was dispatched",
            buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600, 3600),
            registry=self.registry,
        )

    def show(self, loop: str) -> None:
        """Show a loop that has not failed yet: Prometheus sees an increase only from a number that it knows."""
        self._errors.labels(loop)

    def dispatched(self, by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        """Count messages and their lateness."""
        for channel, count in by_channel.items():
            self._dispatched.labels(channel).inc(count)
        for late in lateness_ms:
            self._lateness.observe(late / 1000)

    def failed(self, loop: str) -> None:
        """Count an error."""
        self._errors.labels(loop).inc()

    def render(self) -> bytes:
        """Return all numbers in Prometheus' text form."""
        return generate_latest(self.registry)


class HealthServer:
    """Serves the metrics for Prometheus, and reports that answer with 200 if all is well, and otherwise with 503.

    If another dispatcher of this machine uses the default port, the next free one of the following nine is taken.
    """

    def __init__(
        self, host: str, port: int, *, reports: Mapping[str, Callable[[], dict[str, Any]]], metrics: Callable[[], bytes]
    ) -> None:
        """Listen on the port.

        :param reports: functions by path; each result says under ``well`` whether all is.
        """

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path in reports:
                    report = reports[path]()
                    self._answer(200 if report["well"] else 503, "application/json", json.dumps(report).encode())
                elif path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, metrics())
                else:
                    self._answer(404, "text/plain", f"try {', '.join(reports)} or /metrics\n".encode())

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: health checks come every few seconds."""

        self._server = _listen(host, port, Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="delay-health", daemon=True)

    @property
    def url(self) -> str:
        """The address of the server."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Start the server."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


def _listen(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    last = port + NEXT_PORTS if port == DEFAULT_PORT else port
    for each in range(port, last + 1):
        try:
            return ThreadingHTTPServer((host, each), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or each == last:
                raise ConfigurationError(
                    f"dispatcher health port: cannot listen on {host}:{each} ({error.strerror}); choose another port,"
                    " 0 for any free port, or -1 for none"
                ) from error
    raise AssertionError("unreachable")
