"""A wire between a client and a server that can be cut."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from typing import Self

CHUNK = 65_536


class CuttingProxy:
    """Passes bytes on in both directions until ``cut``; later connections are passed on again."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._clients: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._keeps_answers_back = False

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        _shut(self._listener)
        self._threads[0].join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> int:
        """End all connections without a word and return how many there were."""
        self._keeps_answers_back = False
        clients = list(self._clients)
        for client in clients:
            _shut(client)
        return len(clients)

    def keep_answers_back(self) -> None:
        """Lose what the server says from now on, until the connections are cut."""
        self._keeps_answers_back = True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.add(client)
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            self._pass_on(client, server)
        self._clients.discard(client)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select():
                    source, target = key.fileobj, key.data
                    data = source.recv(CHUNK)  # type: ignore[union-attr]
                    if not data:
                        return
                    if target is not client or not self._keeps_answers_back:
                        target.sendall(data)


def _shut(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
