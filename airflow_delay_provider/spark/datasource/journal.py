"""The journal as a table, whatever the broker, and positions in it.

Entries are read from ``after`` up to ``until``, or up to the end when the read was planned. A read that begins where
the one before ended finds each entry exactly once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.spark.connection import JobConnection, find_job_connection, find_listed_messages
from airflow_delay_provider.spark.datasource.positions import JournalPosition
from airflow_delay_provider.spark.datasource.ranges import TableReader
from airflow_delay_provider.spark.datasource.read_options import OnGap, ReadOptions
from airflow_delay_provider.spark.datasource.record_batches import lateness_of, make_batch

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = {
    "message_id": "string",
    "channel": "string",
    "change": "string",
    "at": "timestamp",
    "time_source": "string",
    "deliver_at": "timestamp",
    # Of dispatches.
    "lateness_ms": "bigint",
    "reason": "string",
    "connection": "string",
    "destination": "string",
    "position": "string",
}


#: Columns that may be the same in all rows of a batch.
_CONSTANTS = ("time_source", "connection", "destination")


class TimeSource(StrEnum):
    """How well the time of an entry is known."""

    #: To the millisecond, by who made the change.
    RECORDED = "recorded"
    #: The end of its second, and the due time if that is later: it cannot show that a message was early.
    SECOND = "second"
    #: When a dispatcher read it from the broker's journal, at once or later.
    READ = "read"
    #: The broker did not record it, and ``at`` is null.
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Section:
    """What part of a journal is read."""

    connection: JobConnection
    #: The connection whose journal a dispatcher copied into the ledger of ``connection``; None reads no copy.
    copy_of: JobConnection | None
    columns: Mapping[str, str]
    #: None is the beginning.
    after: JournalPosition | None
    until: JournalPosition
    partitions: int | None
    on_gap: OnGap
    retention_days: float


class JournalTable(TableReader):
    """A section of one journal."""

    def __init__(self, section: Section) -> None:
        self.section = section

    @classmethod
    @abstractmethod
    def end(cls, connection: JobConnection, *, copy_of: JobConnection | None) -> JournalPosition:
        """Return the position behind the last entry; no entry before it is committed later."""

    @abstractmethod
    def find_gap(self) -> str | None:
        """Say which entries behind ``after`` may be deleted already; None if none is."""


def journal_end(
    connection: str | None = None,
    *,
    connection_file: str | None = None,
    hold: str | None = None,
    copied: bool = False,
) -> str:
    """Return the current end of a journal as text, for the options ``after`` and ``until``.

    Call it on the driver. Every entry that is readable now is before it, and every later one behind it.

    :param copied: the end of the copy that a dispatcher makes in the ledger.
    """
    found = find_job_connection(connection, hold=hold, connection_file=connection_file)
    read_from, copy_of = _find_copy(found) if copied else (found, None)
    return str(_table_of(read_from).end(read_from, copy_of=copy_of))


def journal_gap(options: Mapping[str, str]) -> str | None:
    """Say which entries behind the option ``after`` may be deleted already; None if none is.

    Call it on the driver.

    :param options: those of the read.
    """
    table = open_table(replace(ReadOptions.parse(options), on_gap=OnGap.CONTINUE), {})
    return None if table.section.after is None else table.find_gap()


def open_table(options: ReadOptions, columns: Mapping[str, str]) -> JournalTable:
    """Look up the connection on the driver, and check the positions."""
    found = find_job_connection(options.connection, hold=options.hold, connection_file=options.connection_file)
    connection, copy_of = _find_copy(found) if options.copied else (found, None)
    table = _table_of(connection)
    end = table.end(connection, copy_of=copy_of)
    after = _parse("after", options.after, end)
    until = _parse("until", options.until, end) or end
    if after is not None and not _is_before(after, until):
        raise ConfigurationError(f"after: is behind {'until' if options.until else 'the end'}; swap the positions")
    opened = table(
        Section(
            connection=connection,
            copy_of=copy_of,
            columns=dict(columns),
            after=after,
            until=until,
            partitions=options.partitions,
            on_gap=options.on_gap,
            retention_days=options.retention_days,
        )
    )
    return _beyond_gap(opened)


def _find_copy(connection: JobConnection) -> tuple[JobConnection, JobConnection]:
    """Return the ledger into which a dispatcher copies the journal of a connection, and that connection."""
    if connection.holds_in_ledger:
        raise ConfigurationError(
            f"copied: the journal of {connection.conn_id!r} is in the ledger itself and has no copy; leave it out"
        )
    return find_listed_messages(connection).ledger, connection


def _parse(option: str, text: str | None, end: JournalPosition) -> JournalPosition | None:
    if text is None:
        return None
    position = JournalPosition.parse(option, text)
    position.require_same_journal(option, end)
    if not _is_before(position, end):
        raise ConfigurationError(
            f"{option}: is behind the end of the journal {end.journal!r}, which was restored or created again since"
            f" {position.taken_at.isoformat()}; read it without this option"
        )
    return position


def _is_before(one: JournalPosition, other: JournalPosition) -> bool:
    if one.journal.startswith("ledger"):
        return one.numbers <= other.numbers
    return all(mine <= theirs for mine, theirs in zip(one.numbers, other.numbers, strict=True))


def _beyond_gap(table: JournalTable) -> JournalTable:
    """Refuse to skip deleted entries silently."""
    gap = table.find_gap() if table.section.after is not None else None
    if gap is not None and table.section.on_gap is OnGap.FAIL:
        raise ConfigurationError(
            f"after: {gap}; read without it to get what is left, or add option onGap=continue to accept the gap"
        )
    return table


def _table_of(connection: JobConnection) -> type[JournalTable]:
    """Return the reader for the broker of a connection; the client libraries of others need not be installed."""
    from airflow_delay_provider.spark.datasource.ledger_journal import LedgerJournal

    if connection.holds_in_ledger:
        return LedgerJournal
    if connection.conn_type == "rabbitmq":
        from airflow_delay_provider.spark.datasource.rabbitmq_journal import RabbitMQJournal

        return RabbitMQJournal
    if connection.conn_type in ("kafka", "delay_kafka"):
        from airflow_delay_provider.spark.datasource.kafka_journal import KafkaJournal

        return KafkaJournal
    raise ConfigurationError(
        f"connection: {connection.conn_id!r} has type {connection.conn_type!r}; use one of delay, rabbitmq, delay_kafka"
    )


def make_journal_batch(columns: Mapping[str, str], values: Mapping[str, Any], *, rows: int) -> pa.RecordBatch:
    """Return a batch of entries; ``at_ms`` and ``deliver_at_ms`` are numbers, and constants stand for whole columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    full = {
        name: pa.repeat(pa.scalar(value, pa.string()), rows) if name in _CONSTANTS and _is_one(value) else value
        for name, value in values.items()
    }
    full |= {"at": full["at_ms"], "deliver_at": full["deliver_at_ms"]}
    if "lateness_ms" in columns:
        is_dispatch = pc.equal(pa.array(full["change"], pa.string()), Change.DISPATCHED.value)
        lateness = lateness_of(full["at_ms"], full["deliver_at_ms"])
        full["lateness_ms"] = pc.if_else(is_dispatch, lateness, pa.scalar(None, pa.int64()))
    return make_batch(columns, full)


def _is_one(value: object) -> bool:
    return value is None or isinstance(value, str)
