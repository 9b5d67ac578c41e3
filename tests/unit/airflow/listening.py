"""The port of a Spark master, open or closed; it counts health checks."""

from __future__ import annotations

import json
import socket
from typing import Self

import pytest

from tools.servers.process import free_port


class MasterPort:
    """A port of its own on this machine, closed at first."""

    def __init__(self) -> None:
        self.port = free_port()
        self._counted = 0
        self._server: socket.socket | None = None

    @property
    def name(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def define_connection(self, monkeypatch: pytest.MonkeyPatch, conn_id: str = "spark_default", **extra: str) -> None:
        connection = {"conn_type": "spark", "host": self.name, "extra": extra}
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(connection))

    @property
    def looks(self) -> int:
        """Connections that were made: the kernel keeps them until they are counted here."""
        while self._server is not None:
            try:
                connection, _ = self._server.accept()
            except BlockingIOError:
                break
            self._counted += 1
            connection.close()
        return self._counted

    def open(self) -> Self:
        self._server = socket.create_server(("127.0.0.1", self.port), backlog=100)
        self._server.setblocking(False)
        return self

    def close(self) -> None:
        if self._server is not None:
            self._counted = self.looks
            self._server.close()
            self._server = None
