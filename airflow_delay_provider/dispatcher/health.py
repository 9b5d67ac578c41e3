"""``/health`` and ``/metrics`` over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from airflow_delay_provider.exceptions import ConfigurationError


class HealthServer:
    """Answers on a local port: 200 while all is well, 503 otherwise, and the numbers for Prometheus."""

    def __init__(
        self, host: str, port: int, *, health: Callable[[], dict[str, Any]], metrics: Callable[[], bytes]
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                match self.path.partition("?")[0]:
                    case "/health":
                        report = health()
                        self._answer(200 if report["well"] else 503, "application/json", json.dumps(report).encode())
                    case "/metrics":
                        self._answer(200, CONTENT_TYPE_LATEST, metrics())
                    case _:
                        self._answer(404, "text/plain", b"try /health or /metrics\n")

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Probes come every few seconds; they are not worth a line each."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigurationError(
                f"dispatcher health port: {host}:{port} cannot be used ({error.strerror}); choose another port, 0 for"
                " any free one, or -1 for none"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="delay-health", daemon=True)

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
