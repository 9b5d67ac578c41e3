"""The journal of a ledger: its table of events, in the order in which transactions end.

It has the entries of messages that the ledger holds. A dispatcher may also copy the journal of another broker into it;
that copy is another journal here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, and_, case, exists, func, literal, null, or_, select, text
from sqlalchemy.sql import ColumnElement, Select

from airflow_delay_provider.brokers.ledger.database import read_identity
from airflow_delay_provider.brokers.ledger.dialect import database_now_ms, oldest_running_transaction
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED, event, journal_position, scheduled_message
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import TIME_UNKNOWN, Change
from airflow_delay_provider.spark.connection import JobConnection
from airflow_delay_provider.spark.datasource.filters import Condition, sql_of
from airflow_delay_provider.spark.datasource.journal import JournalTable, Section, TimeSource, make_journal_batch
from airflow_delay_provider.spark.datasource.positions import OF_CONNECTION, JournalPosition
from airflow_delay_provider.spark.datasource.ranges import Range, split
from airflow_delay_provider.spark.datasource.record_batches import open_ledger, stream_rows

if TYPE_CHECKING:
    import pyarrow as pa

_EVENT = event.c
_MESSAGE = scheduled_message.c
_ROWS = 20_000
#: Changes that the broker itself makes.
_OF_BROKER = (Change.DISPATCHED, Change.PARKED)
_TEXTS = {name: _EVENT[name] for name in ("message_id", "channel", "change", "reason")}
_TIMES = {name: _EVENT[f"{name}_ms"] for name in ("at", "deliver_at")}

#: What is not simply a column of the journal. A time that was not recorded is null.
_COMPUTED: dict[str, ColumnElement[Any]] = {
    "destination": _MESSAGE.destination,
    "at_ms": case((_EVENT.reason == TIME_UNKNOWN, null()), else_=_EVENT.at_ms).label("at_ms"),
}


class LedgerJournal(JournalTable):
    """Events, divided by their numbers.

    Numbers are handed out before transactions end, so a position is a transaction and a number: everything before it
    has ended, and what ends later is behind it.
    """

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        with open_ledger(section.connection) as ledger, ledger.read() as connection:
            self._has_copies = _has_copies(connection)
        is_selection = section.copy_of is not None or section.connection.conn_type != "delay"
        #: None selects all messages that this ledger holds.
        self._destination = section.connection.conn_id if is_selection else None

    @classmethod
    def end(cls, connection: JobConnection, *, copy_of: JobConnection | None) -> JournalPosition:
        with open_ledger(connection) as ledger, ledger.read() as session:
            identity = read_identity(session)
            now_ms = session.execute(select(database_now_ms(session))).scalar_one()
            name = f"ledger {identity.id}"
            if copy_of is not None:
                name += f", copy of {copy_of.conn_id}"
            elif connection.conn_type != "delay":
                name += f"{OF_CONNECTION}{connection.conn_id}"
            return JournalPosition(journal=name, taken_at_ms=int(now_ms), numbers=_end_numbers(session))

    def find_gap(self) -> str | None:
        after, until = self.section.after, self.section.until
        if after is None:
            return None
        with open_ledger(self.section.connection) as ledger, ledger.read() as connection:
            now_ms = int(connection.execute(select(database_now_ms(connection))).scalar_one())
        kept_since = from_ms(now_ms) - timedelta(days=self.section.retention_days)
        if after.taken_at >= kept_since or after.numbers == until.numbers:
            return None
        return (
            f"the position is of {after.taken_at:%Y-%m-%d %H:%M} UTC, and the ledger deletes finished messages with"
            f" their entries after {self.section.retention_days:g} days (option retentionDays, as the dispatcher's"
            " retention_days), so entries behind it may be missing"
        )

    def applies(self, condition: Condition) -> bool:
        return _sql_of(condition) is not None

    def divide(self, conditions: Sequence[Condition]) -> Sequence[Range]:  # noqa: ARG002 - read() applies them
        query = select(func.min(_EVENT.seq), func.max(_EVENT.seq))
        with open_ledger(self.section.connection) as ledger, ledger.read() as connection:
            # Without a beginning, both ends of the primary key are enough; the rows themselves are checked again.
            if self.section.after is not None:
                query = query.where(*_between(connection, self.section))
            first, last = connection.execute(query).one()
        return [] if first is None else split(first, last + 1, self.section.partitions)

    def read(self, part: Range, conditions: Sequence[Condition]) -> Iterator[pa.RecordBatch]:
        columns = self.section.columns
        stored = _stored_columns(columns)
        with open_ledger(self.section.connection) as ledger:
            with ledger.read() as connection:
                between = _between(connection, self.section)
            query = self._query(stored).where(_EVENT.seq >= part.start, _EVENT.seq < part.end, *between)
            query = query.where(*(sql for each in conditions if (sql := _sql_of(each)) is not None))
            for page in stream_rows(ledger, query, rows=_ROWS):
                values: dict[str, Any] = dict(zip(stored, zip(*page, strict=True), strict=True))
                values |= {"connection": self.section.connection.conn_id}
                values["time_source"] = self._time_sources(values["change"], values["at_ms"])
                if "position" in columns:
                    values["position"] = [f"{xid}:{seq}" for xid, seq in zip(values["xid"], values["seq"], strict=True)]
                yield make_journal_batch(columns, values, rows=len(page))

    def _time_sources(self, changes: Sequence[str], at_ms: Sequence[int | None]) -> str | list[str]:
        """Return how the times are known: RabbitMQ tells that of a dispatch only to who reads it at once."""
        copy_of = self.section.copy_of
        if copy_of is None or copy_of.conn_type != "rabbitmq":
            return TimeSource.RECORDED.value
        return [
            TimeSource.UNKNOWN if ms is None else TimeSource.READ if change in _OF_BROKER else TimeSource.RECORDED
            for change, ms in zip(changes, at_ms, strict=True)
        ]

    def _query(self, stored: Sequence[str]) -> Select[Any]:
        """Return the query; it joins the messages only if something needs them."""
        columns = [_COMPUTED[name] if name in _COMPUTED else _EVENT[name] for name in stored]
        query = select(*columns)
        if not (self._has_copies or self._destination or "destination" in stored):
            return query
        query = query.outerjoin_from(event, scheduled_message, _MESSAGE.seq == _EVENT.message_seq)
        if self.section.copy_of is None:
            query = query.where(or_(_MESSAGE.held_by_broker.is_(None), _MESSAGE.held_by_broker == 0))
        else:
            query = query.where(_MESSAGE.held_by_broker == 1)
        return query if self._destination is None else query.where(_MESSAGE.destination == self._destination)


def _end_numbers(connection: Connection) -> tuple[int, int]:
    if connection.dialect.name == "sqlite":
        # The number of the last row ever, which may be deleted by now.
        last = connection.execute(text("SELECT seq FROM sqlite_sequence WHERE name = 'delay_event'")).scalar()
        return 0, int(last or 0)
    return int(connection.execute(select(oldest_running_transaction(connection))).scalar_one()), 0


def _has_copies(connection: Connection) -> bool:
    """Whether a dispatcher has ever copied the journal of another broker into this ledger."""
    copied = exists().where(journal_position.c.destination != EMBEDDED)
    return bool(connection.execute(select(copied)).scalar())


def _between(connection: Connection, section: Section) -> list[ColumnElement[bool]]:
    """Match entries behind ``after`` and up to ``until``."""
    after = (0, 0) if section.after is None else section.after.numbers
    until = section.until.numbers
    if connection.dialect.name == "sqlite":
        return [_EVENT.seq > after[1], _EVENT.seq <= until[1]]
    return [_is_behind(*after), ~_is_behind(*until)]


def _is_behind(xid: int, seq: int) -> ColumnElement[bool]:
    # In parts: for a comparison of pairs PostgreSQL has no statistics, and may read all of the index.
    return or_(_EVENT.xid > literal(xid), and_(_EVENT.xid == literal(xid), _EVENT.seq > literal(seq)))


def _stored_columns(columns: Any) -> list[str]:
    wanted = ["at_ms", "deliver_at_ms", "change"]
    wanted += [name for name in ("message_id", "channel", "reason", "destination") if name in columns]
    return wanted + (["xid", "seq"] if "position" in columns else [])


def _sql_of(condition: Condition) -> Any:
    return sql_of(condition, texts=_TEXTS, times=_TIMES)
