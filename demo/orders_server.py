"""A web server with orders, which the demo starts only after a Spark job has failed without it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
ORDERS = [{"id": number, "state": "paid" if number % 3 else "open"} for number in range(1, 1001)]


def orders_url(port: int) -> str:
    """Return the address of the orders."""
    return f"http://{HOST}:{port}/orders.jsonl"


@contextmanager
def orders_server(port: int) -> Iterator[None]:
    """Serve the orders as JSON Lines on this port."""
    with ThreadingHTTPServer((HOST, port), _Orders) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


class _Orders(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = "".join(f"{json.dumps(order)}\n" for order in ORDERS).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
