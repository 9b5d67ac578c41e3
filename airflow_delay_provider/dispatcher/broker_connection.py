"""The broker of one connection: opened when needed, and opened again when the connection has changed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from airflow_delay_provider.brokers.port import Broker

log = logging.getLogger(__name__)

#: From the id of a connection to its broker, which connects when it is used.
OpenBroker = Callable[[str], Broker]


class BrokerConnection:
    """The broker of one loop.

    The connection is looked up again after :meth:`close`, and from time to time while the broker works, in a separate
    thread, so that a slow secrets backend delays nothing. If the connection has changed, the broker is opened again: a
    rotated password or a new host needs no restart.
    """

    def __init__(
        self,
        conn_id: str,
        open_broker: OpenBroker,
        *,
        reread: timedelta,
        before_close: Callable[[], None] | None = None,
    ) -> None:
        """Remember how to open the broker.

        :param before_close: closes what the loop has opened on the broker.
        """
        self._before_close = before_close or (lambda: None)
        self._conn_id = conn_id
        self._open_broker = open_broker
        self._reread_seconds = reread.total_seconds()
        self._broker: Broker | None = None
        self._looked_up_at = 0.0
        self._lookup: _Lookup | None = None

    def get(self) -> Broker:
        """Return the broker of the latest known connection."""
        if self._broker is None:
            self._broker = self._open_broker(self._conn_id)
            self._looked_up_at = time.monotonic()
        elif self._lookup is not None:
            self._use_found(self._broker, self._lookup)
        elif time.monotonic() - self._looked_up_at >= self._reread_seconds:
            self._lookup = _Lookup(lambda: self._open_broker(self._conn_id))
        return self._broker

    def close(self) -> None:
        """Close the broker; the next use looks the connection up again."""
        self._before_close()
        broker, self._broker = self._broker, None
        # The next use finds a newer connection than a lookup that still runs.
        self._lookup = None
        if broker is not None:
            self._close(broker)

    def _use_found(self, broker: Broker, lookup: _Lookup) -> None:
        if lookup.is_running:
            return
        self._lookup, self._looked_up_at = None, time.monotonic()
        found = lookup.found
        if found is None:
            log.warning(
                "Connection %s could not be looked up again (%s); using the previous one",
                self._conn_id,
                lookup.error,
            )
        elif found is broker:
            pass
        elif found.is_like(broker):
            self._close(found)
        else:
            log.info("Connection %s has changed; opening it again", self._conn_id)
            self._before_close()
            self._broker = found
            self._close(broker)

    def _close(self, broker: Broker) -> None:
        try:
            broker.close()
        except Exception:
            # Confirmed messages are marked, and the others are still scheduled.
            log.warning("The broker of connection %s did not close cleanly", self._conn_id, exc_info=True)


class _Lookup:
    """One lookup of a connection, beside the loop that uses it."""

    def __init__(self, open_broker: Callable[[], Broker]) -> None:
        self.found: Broker | None = None
        self.error: Exception | None = None
        self._open_broker = open_broker
        self._thread = threading.Thread(target=self._run, name="delay-look-up", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.found = self._open_broker()
        except Exception as error:  # noqa: BLE001 - whatever a secrets backend raises, the current broker is kept
            self.error = error
