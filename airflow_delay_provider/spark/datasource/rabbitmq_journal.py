"""The journal of a RabbitMQ ladder: its stream, read by one task up to the end that it had when the read was planned.

The broker itself writes the records. From 4.0 on they contain the second of a dispatch, whose end is taken for its
time; before, they do not, as streams lost the header ``x-death``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.brokers.rabbitmq.client import RabbitMQClient
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.journal_stream import (
    BEFORE_ALL,
    LOOK_AHEAD,
    PREFETCH,
    PendingEntry,
    StreamCursor,
    first_offset_since,
    newest_offset,
    parse_position,
)
from airflow_delay_provider.domain.clock import EPOCH, ceil_ms, floor_ms
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError
from airflow_delay_provider.domain.lifecycle import TIME_UNKNOWN, JournalEntry
from airflow_delay_provider.spark.connection import JobConnection
from airflow_delay_provider.spark.datasource.filters import Condition, accepted
from airflow_delay_provider.spark.datasource.journal import JournalTable, TimeSource, make_journal_batch
from airflow_delay_provider.spark.datasource.positions import JournalPosition
from airflow_delay_provider.spark.datasource.ranges import Range

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_delay_provider.brokers.rabbitmq.connection import AmqpConnection

#: Given as the current time, so that a record has the same times whenever it is read.
FAR = datetime(9999, 1, 1, tzinfo=UTC)
_ROWS = 20_000
#: How long the broker may take for records that exist.
SILENCE_SECONDS = 30.0


class RabbitMQJournal(JournalTable):
    """Records of the stream.

    A dispatch that was parked right after it, because the queue is gone, is left out. To know that at both ends, the
    reader also looks at some records before the first and behind the last one.
    """

    @classmethod
    def end(cls, connection: JobConnection, *, copy_of: JobConnection | None) -> JournalPosition:  # noqa: ARG003
        with _stream_of(connection) as stream:
            return JournalPosition(
                journal=f"rabbitmq {stream.config.name} {stream.config.topology.journal_name}",
                taken_at_ms=int(time.time() * 1000),
                numbers=(newest_offset(stream),),
            )

    def find_gap(self) -> str | None:
        after = -1 if self.section.after is None else self.section.after.numbers[0]
        with _stream_of(self.section.connection) as stream:
            first = first_offset_since(stream, EPOCH)
        if first <= after + 1:
            return None
        return (
            f"{first - after - 1} records behind the position are deleted, because the journal keeps entries only for"
            " a while"
        )

    def applies(self, condition: Condition) -> bool:
        return condition.operator == "in" and condition.column in ("change", "channel")

    def divide(self, conditions: Sequence[Condition]) -> Sequence[Range]:  # noqa: ARG002 - a stream has no index
        start = -1 if self.section.after is None else self.section.after.numbers[0]
        end = self.section.until.numbers[0] + 1
        return [Range(start + 1, end)] if start + 1 < end else []

    def read(self, part: Range, conditions: Sequence[Condition]) -> Iterator[pa.RecordBatch]:
        changes, channels = accepted(conditions, "change"), accepted(conditions, "channel")
        page: list[PendingEntry] = []
        with _stream_of(self.section.connection) as stream:
            for pending in _entries(stream, part):
                entry = pending.entry
                if changes is not None and entry.change not in changes:
                    continue
                if channels is None or entry.channel in channels:
                    page.append(pending)
                if len(page) >= _ROWS:
                    yield self._batch(page)
                    page = []
        if page:
            yield self._batch(page)

    def _batch(self, page: Sequence[PendingEntry]) -> pa.RecordBatch:
        entries = [pending.entry for pending in page]
        values: dict[str, Any] = {
            "message_id": [entry.message_id for entry in entries],
            "channel": [entry.channel for entry in entries],
            "change": [entry.change for entry in entries],
            "at_ms": [_known_at_ms(entry) for entry in entries],
            "deliver_at_ms": [ceil_ms(entry.deliver_at) for entry in entries],
            # ``time_source`` says that a time is unknown.
            "reason": [None if entry.reason == TIME_UNKNOWN else entry.reason for entry in entries],
            "position": [entry.position for entry in entries],
            "time_source": [_time_source(pending) for pending in page],
            "connection": self.section.connection.conn_id,
            "destination": self.section.connection.conn_id,
        }
        return make_journal_batch(self.section.columns, values, rows=len(page))


def _known_at_ms(entry: JournalEntry) -> int | None:
    """Return the time of an entry, if its record tells it."""
    is_unknown = entry.lateness is None or entry.at > FAR - timedelta(days=1)
    return None if is_unknown else floor_ms(entry.at)


def _entries(stream: AmqpConnection, part: Range) -> Iterator[PendingEntry]:
    """Return the entries of a range of records, without dispatches that were parked."""
    begin = part.start - LOOK_AHEAD - 1
    last = part.end - 1
    cursor = StreamCursor(stream, (begin, 0) if begin >= 0 else BEFORE_ALL)
    deadline = time.monotonic() + SILENCE_SECONDS
    try:
        while cursor.offset < last or cursor.holds_back(None, up_to=last):
            before = cursor.offset
            for pending in cursor.read(PREFETCH, FAR):
                if part.start <= parse_position(pending.entry.position)[0] <= last:
                    yield pending
            if cursor.offset > before or cursor.offset >= last:
                deadline = time.monotonic() + SILENCE_SECONDS
            if not cursor.is_open or time.monotonic() > deadline:
                raise BrokerError(f"{stream.config.name}: the journal could not be read to its end; try again")
    finally:
        cursor.close()


def _time_source(pending: PendingEntry) -> TimeSource:
    if pending.is_exact:
        return TimeSource.RECORDED
    return TimeSource.UNKNOWN if _known_at_ms(pending.entry) is None else TimeSource.SECOND


@contextmanager
def _stream_of(connection: JobConnection) -> Iterator[AmqpConnection]:
    config = RabbitMQConfig.from_settings(
        connection.extra_dejson,
        host=connection.host,
        port=connection.port,
        vhost=connection.schema,
        login=connection.login,
        password=connection.password,
    )
    if not config.topology.journal:
        raise ConfigurationError(
            f"connection: the journal of {connection.conn_id!r} is off, so it is unknown what was dispatched; set"
            " journal to true in its extra"
        )
    with closing(RabbitMQClient(config)) as client:
        yield client.connection_with_ladder()
