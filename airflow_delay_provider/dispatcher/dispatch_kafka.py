"""Deliver the delayed messages that a Kafka connection stores."""

from __future__ import annotations

import logging

from airflow_delay_provider.brokers.port import LadderDispatcher, NeedsDispatcher
from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection, OpenBroker
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError

log = logging.getLogger(__name__)


class DispatchKafka:
    """Serves one connection; several dispatchers that serve the same one share its partitions.

    Work that was not committed is repeated after any error, by this dispatcher or by another. The ladder dispatcher is
    kept after an error that may pass; after any other the connection is read again.
    """

    def __init__(self, context: Context, conn_id: str, open_broker: OpenBroker) -> None:
        self.name = f"dispatch_kafka:{conn_id}"
        self._context = context
        self._conn_id = conn_id
        self._connection = BrokerConnection(
            conn_id, open_broker, reread=context.config.reread_interval, before_close=self._close_ladder
        )
        self._ladder: LadderDispatcher | None = None
        self._trouble: str | None = None

    def run_once(self) -> float:
        """Deliver what is due now."""
        try:
            ladder = self._open()
            pause = ladder.run_once()
        except Exception as error:
            if not (isinstance(error, BrokerError) and error.may_pass):
                self.close()
            raise
        if ladder.trouble is not None and self._trouble is None:
            log.error("%s: %s", self.name, ladder.trouble)
        self._trouble = ladder.trouble
        return pause

    def troubles(self) -> dict[str, str]:
        """Return what is not served although the loop runs."""
        return {} if self._trouble is None else {"ladder": self._trouble}

    def close(self) -> None:
        """Finish and close the broker; the next run opens it again."""
        self._connection.close()

    def _close_ladder(self) -> None:
        ladder, self._ladder, self._trouble = self._ladder, None, None
        if ladder is not None:
            try:
                ladder.close()
            except Exception:
                # Kafka aborts the open transaction, and the next dispatcher repeats its work.
                log.warning("%s did not close cleanly", self.name, exc_info=True)

    def _open(self) -> LadderDispatcher:
        broker = self._connection.get()
        if self._ladder is None:
            if not isinstance(broker, NeedsDispatcher):
                raise ConfigurationError(
                    f"kafka: connection {self._conn_id!r} is not a Kafka connection, and its broker needs no"
                    " dispatcher; use a connection of type delay_kafka or kafka"
                )
            self._ladder = broker.open_ladder_dispatcher(
                instance=self._context.config.instance, on_dispatched=self._context.report_dispatched
            )
        return self._ladder
