"""Messages that wait in a broker without a clock are moved on, step by step, until they are due."""

from __future__ import annotations

import logging

from airflow_delay_provider.brokers.base import Climbed, Climber
from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection, OpenBroker
from airflow_delay_provider.dispatcher.context import Context
from airflow_delay_provider.exceptions import BrokerError, ConfigurationError

log = logging.getLogger(__name__)


class ClimbLadder:
    """Serves one connection. Several dispatchers that do so share its messages.

    Whatever goes wrong, what was begun and not committed is begun anew, by this dispatcher or by another. A climber
    goes on after what may pass, with what it has learned; after anything else the connection is read again.
    """

    def __init__(self, context: Context, conn_id: str, open_broker: OpenBroker) -> None:
        self.name = f"climb_ladder:{conn_id}"
        self._context = context
        self._conn_id = conn_id
        self._connection = BrokerConnection(
            conn_id, open_broker, reread=context.config.reread_interval, before_close=self._stop_climbing
        )
        self._climber: Climber | None = None
        self._trouble: str | None = None

    def run_once(self) -> float:
        """Move on what is to be moved now."""
        try:
            climber = self._open()
            pause = climber.run_once()
        except Exception as error:
            if not (isinstance(error, BrokerError) and error.may_pass):
                self.close()
            raise
        if climber.trouble is not None and self._trouble is None:
            log.error("%s: %s", self.name, climber.trouble)
        self._trouble = climber.trouble
        return pause

    def troubles(self) -> dict[str, str]:
        """Return what stands still, or is not served, although the loop runs."""
        return {} if self._trouble is None else {"ladder": self._trouble}

    def close(self) -> None:
        """Finish what is begun and let go of the broker; the next run opens it again."""
        self._connection.close()

    def _stop_climbing(self) -> None:
        climber, self._climber, self._trouble = self._climber, None, None
        if climber is not None:
            try:
                climber.close()
            except Exception:
                # The broker undoes what was begun, and whoever serves it next does it again.
                log.warning("%s did not close cleanly", self.name, exc_info=True)

    def _open(self) -> Climber:
        broker = self._connection.get()
        if self._climber is None:
            if not isinstance(broker, Climbed):
                raise ConfigurationError(
                    f"climb: the broker of connection {self._conn_id!r} needs nobody to move its messages on; name a"
                    " connection of type delay_kafka or kafka"
                )
            self._climber = broker.open_climber(
                instance=self._context.config.instance, on_dispatched=self._context.tell_dispatched
            )
        return self._climber
