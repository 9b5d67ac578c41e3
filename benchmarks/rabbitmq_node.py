"""The RabbitMQ that is measured, and the CPU time it uses."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pika
import psutil

from tests.rabbits import URL_VARIABLE
from tests.servers.rabbitmq import RabbitMQ


class Node:
    """A node on this machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        port = pika.URLParameters(url).port
        # The process that listens is the whole broker: its helpers use next to nothing.
        pids = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
        if None in pids or len(pids) != 1:
            raise RuntimeError(f"no RabbitMQ of this user listens on port {port} of this machine: unset {URL_VARIABLE}")
        self._process = psutil.Process(pids.pop())

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the broker has used since it began."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def idle_share(self, seconds: float) -> float:
        """Return how much of one core the broker uses while nobody asks for anything."""
        before = self.cpu_seconds
        time.sleep(seconds)
        return (self.cpu_seconds - before) / seconds

    def version(self) -> str:
        """Return the version that the server tells."""
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            found: str = connection._impl.server_properties["version"]
            return found


@contextmanager
def open_node(scratch: Path) -> Iterator[Node]:
    """Use the node given by the environment, or a private one."""
    if url := os.environ.get(URL_VARIABLE):
        yield Node(url)
        return
    server = RabbitMQ()
    try:
        server.start(scratch)
        yield Node(server.url)
    finally:
        server.stop()
