"""Notices that messages may be due sooner than a dispatcher knows, so that an idle one need not ask again and again.

Whoever stores a message that is due soon sends a notice. A dispatcher looks by itself at least every
``LOOK_SECONDS``: a message that is due later needs no notice, and a lost notice costs that time at most.
"""

from __future__ import annotations

import logging
import selectors
import socket
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.exceptions import DelayError

log = logging.getLogger(__name__)

#: How often a dispatcher that receives notices looks by itself.
LOOK_SECONDS = 1.0
#: Messages that are due later are not announced; well above ``LOOK_SECONDS``, since clocks of machines differ.
SOON_MS = 5_000
CHANNEL = "delay_due"
#: How often a listener checks that notices reach it, and how long a notice may take.
PROBE_SECONDS = 10.0
#: Between attempts to listen again.
RETRY_SECONDS = 1.0


def announce(connection: Connection, due_ms: int, *, now_ms: int) -> None:
    """Wake idle dispatchers after the commit, if a message is due before they look by themselves.

    SQLite needs no notice: dispatchers see that the file has changed.
    """
    if connection.dialect.name == "postgresql" and due_ms - now_ms < SOON_MS:
        connection.execute(select(func.pg_notify(CHANNEL, "")))


def open_notices(ledger: Ledger, *, on_notice: Callable[[], None], interval: float) -> Notices | None:
    """Return what calls ``on_notice`` when a message may be due sooner; None if this database cannot tell.

    :param interval: between two looks at a SQLite file, in seconds.
    """
    if ledger.dialect == "postgresql":
        return PostgresNotices(ledger, on_notice)
    file = ledger.url.database
    # A database in memory has only one connection.
    return SqliteNotices(file, on_notice, interval) if file and file != ":memory:" else None


class Notices(ABC):
    """Waits for notices in its own thread; errors never end it."""

    def __init__(self, on_notice: Callable[[], None]) -> None:
        #: Whether a message that is due soon is announced; if not, a dispatcher must ask.
        self.is_listening = False
        self._on_notice = on_notice
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delay-notices", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and close the connection."""
        self._stopped.set()
        self._thread.join(RETRY_SECONDS)

    @abstractmethod
    def _listen(self) -> None:
        """Listen until the connection fails or :meth:`stop` is called."""

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._listen()
            except (SQLAlchemyError, DelayError, OSError, self._driver_error()) as error:
                log.debug("No notices of the ledger: %s", error)
            self.is_listening = False
            # Something may have been announced meanwhile; from now on, loops ask.
            self._on_notice()
            self._stopped.wait(RETRY_SECONDS)

    def _driver_error(self) -> type[Exception]:
        return sqlite3.Error


class PostgresNotices(Notices):
    """Listens on a connection of its own.

    A pooler between here and the server may swallow notices, and a broken network drops them silently. So it counts as
    listening only while it hears notices that it sends itself, over another connection.
    """

    def __init__(self, ledger: Ledger, on_notice: Callable[[], None]) -> None:
        super().__init__(on_notice)
        self._ledger = ledger
        self._waking, self._wake = socket.socketpair()

    def stop(self) -> None:
        if self._stopped.is_set():
            return
        self._stopped.set()
        # It may wait for the server.
        self._wake.send(b"x")
        super().stop()
        self._waking.close()
        self._wake.close()

    def _driver_error(self) -> type[Exception]:
        import psycopg

        return psycopg.Error

    def _listen(self) -> None:
        engine = self._ledger.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection, selectors.DefaultSelector() as selector:
            connection.exec_driver_sql(f"LISTEN {CHANNEL}")
            driver: Any = connection.connection.driver_connection
            selector.register(driver.fileno(), selectors.EVENT_READ)
            selector.register(self._waking, selectors.EVENT_READ)
            try:
                self._hear(driver, selector)
            finally:
                # Another user of the pool must not get the notices.
                connection.invalidate()

    def _hear(self, driver: Any, selector: selectors.BaseSelector) -> None:
        while not self._stopped.is_set():
            probe, until = str(uuid4()), time.monotonic() + PROBE_SECONDS
            self._send(probe)
            is_heard = False
            while (rest := until - time.monotonic()) > 0 and not self._stopped.is_set():
                selector.select(rest)
                payloads = _read(driver)
                is_heard = is_heard or probe in payloads
                if probe in payloads and not self.is_listening:
                    self.is_listening = True
                    # What was stored before is not announced.
                    self._on_notice()
                if "" in payloads:
                    self._on_notice()
            if not is_heard and not self._stopped.is_set():
                raise OSError(f"notices of the ledger do not arrive within {PROBE_SECONDS:g} s")

    def _send(self, payload: str) -> None:
        with self._ledger.engine.begin() as connection:
            connection.execute(select(func.pg_notify(CHANNEL, payload)))


def _read(driver: Any) -> list[str]:
    """Return the payloads of the notices that have arrived."""
    driver.pgconn.consume_input()
    payloads = []
    while (notice := driver.pgconn.notifies()) is not None:
        payloads.append(notice.extra.decode())
    return payloads


class SqliteNotices(Notices):
    """Reads a number of the file that changes with each commit: a hundredth of what a query costs."""

    def __init__(self, file: str, on_notice: Callable[[], None], interval: float) -> None:
        super().__init__(on_notice)
        self._file = file
        self._interval = interval

    def _listen(self) -> None:
        connection = sqlite3.connect(self._file, isolation_level=None)
        try:
            known = self._version(connection)
            self.is_listening = True
            # What was stored before does not change the number.
            self._on_notice()
            while not self._stopped.wait(self._interval):
                if (version := self._version(connection)) != known:
                    known = version
                    self._on_notice()
        finally:
            connection.close()

    @staticmethod
    def _version(connection: sqlite3.Connection) -> int:
        version: int = connection.execute("PRAGMA data_version").fetchone()[0]
        return version
