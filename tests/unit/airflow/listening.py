"""The port of a Spark master: somebody listens there or not, and every look at it is counted."""

from __future__ import annotations

import json
import socket
import threading
from typing import Self

import pytest

from tests.servers.process import free_port


class MasterPort:
    """A port of its own on this machine, closed at first."""

    def __init__(self) -> None:
        self.port = free_port()
        #: Connections that were accepted.
        self.looks = 0
        self._server: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def define_connection(self, monkeypatch: pytest.MonkeyPatch, conn_id: str = "spark_default", **extra: str) -> None:
        connection = {"conn_type": "spark", "host": self.name, "extra": extra}
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(connection))

    def open(self) -> Self:
        self._server = socket.create_server(("127.0.0.1", self.port), backlog=100)
        self._thread = threading.Thread(target=self._accept, args=(self._server,))
        self._thread.start()
        return self

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._server.close()
            self._server = None

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            self.looks += 1
            connection.close()
