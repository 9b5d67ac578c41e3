"""The broker of one connection, opened when it is needed and again when the connection has changed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from airflow_delay_provider.brokers.base import Broker

log = logging.getLogger(__name__)

#: From the id of a connection to its broker, which connects when it is used.
OpenBroker = Callable[[str], Broker]


class BrokerConnection:
    """Belongs to one loop, which alone uses the broker.

    After :meth:`close` the connection is looked up again. While the broker works, it is looked up from time to time in
    a thread of its own, so that a slow secrets backend holds up nothing, and the broker is opened again if the
    connection differs: a rotated password or a new host needs no restart.
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

        :param before_close: lets go of what the loop has made from a broker, before that is closed.
        """
        self._before_close = before_close or (lambda: None)
        self._conn_id = conn_id
        self._open_broker = open_broker
        self._reread_seconds = reread.total_seconds()
        self._broker: Broker | None = None
        self._looked_at = 0.0
        self._look: _Look | None = None

    def get(self) -> Broker:
        """Return the broker as the connection says, as far as known."""
        if self._broker is None:
            self._broker = self._open_broker(self._conn_id)
            self._looked_at = time.monotonic()
        elif self._look is not None:
            self._take_news(self._broker, self._look)
        elif time.monotonic() - self._looked_at >= self._reread_seconds:
            self._look = _Look(lambda: self._open_broker(self._conn_id))
        return self._broker

    def close(self) -> None:
        """Let go of the broker; the next use looks the connection up."""
        self._before_close()
        broker, self._broker = self._broker, None
        # What a look that is under way finds is older than what the next use finds.
        self._look = None
        if broker is not None:
            self._close(broker)

    def _take_news(self, broker: Broker, look: _Look) -> None:
        if look.is_running:
            return
        self._look, self._looked_at = None, time.monotonic()
        found = look.found
        if found is None:
            log.warning(
                "Connection %s could not be looked up again (%s); what was found before is used",
                self._conn_id,
                look.error,
            )
        elif found is broker:
            pass
        elif found.is_like(broker):
            self._close(found)
        else:
            log.info("Connection %s has changed; it is opened again", self._conn_id)
            self._before_close()
            self._broker = found
            self._close(broker)

    def _close(self, broker: Broker) -> None:
        try:
            broker.close()
        except Exception:
            # What it has confirmed is marked, and the rest waits.
            log.warning("The broker of connection %s did not close cleanly", self._conn_id, exc_info=True)


class _Look:
    """One lookup of a connection, beside the loop that uses it."""

    def __init__(self, look: Callable[[], Broker]) -> None:
        self.found: Broker | None = None
        self.error: Exception | None = None
        self._look = look
        self._thread = threading.Thread(target=self._run, name="delay-look-up", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.found = self._look()
        except Exception as error:  # noqa: BLE001 - whatever a secrets backend raises, the broker that works is kept
            self.error = error
