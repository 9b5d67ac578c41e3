"""When messages were dispatched, as far as the records of the journal tell.

RabbitMQ 4 keeps the second of a dispatch in its record. RabbitMQ 3.10 keeps no time at all, so there only a client that
reads the record at once knows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from airflow_delay_provider.brokers.rabbitmq.receive import AmqpMessage

ONE_SECOND = timedelta(seconds=1)


class DispatchTimes:
    """Finds the times of dispatches: never before the true one, and less than two seconds after it."""

    def __init__(self, first_offset_since: Callable[[datetime], int]) -> None:
        """Find nothing yet.

        :param first_offset_since: returns an offset before which all records are older than a moment.
        """
        self._first_offset_since = first_offset_since
        #: Records before this offset are older than the moment, all others are not.
        self._boundary: tuple[int, datetime] = (0, datetime.min.replace(tzinfo=UTC))

    def find(self, record: AmqpMessage, *, due: datetime, now: datetime) -> datetime | None:
        """Return when the last wait of a message ended, or None if that is unknown."""
        received = self.received(record, now)
        deaths = (record.properties.headers or {}).get("x-death") or [{}]
        second: datetime | None = deaths[0].get("time")
        if second is not None:
            second = second.replace(tzinfo=UTC) if second.tzinfo is None else second
            return max(due, min(received, second + ONE_SECOND))
        # No message is early, so it was dispatched between its due time and the time when the record came.
        if received <= due + ONE_SECOND or self._is_new(record, received):
            return max(due, received)
        return None

    def received(self, record: AmqpMessage, now: datetime) -> datetime:
        """Return when the record came, by the clock that says ``now``."""
        return now - timedelta(seconds=max(0.0, time.monotonic() - record.received_at))

    def _is_new(self, record: AmqpMessage, received: datetime) -> bool:
        """Whether the record was written at most two seconds before it came: AMQP asks for whole seconds.

        The broker is asked about once a second, however many records come.
        """
        offset, moment = self._boundary
        latest = (received - ONE_SECOND).replace(microsecond=0)
        is_old = offset_of(record) < offset and moment <= latest
        is_new = offset_of(record) >= offset and received - moment <= 2 * ONE_SECOND
        if is_old or is_new:
            return is_new
        offset = self._first_offset_since(latest)
        self._boundary = (offset, latest)
        return offset_of(record) >= offset


def offset_of(record: AmqpMessage) -> int:
    """Return the offset of a record in its stream."""
    offset: int = (record.properties.headers or {}).get("x-stream-offset", -1)
    return offset
