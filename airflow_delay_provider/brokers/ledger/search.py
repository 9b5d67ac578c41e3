"""Find messages by any criteria, page by page; a page reads a bounded number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, literal, select, tuple_, union_all
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from airflow_delay_provider.brokers.ledger.dialect import contains
from airflow_delay_provider.brokers.ledger.listing import MAX_PAGE_SIZE, SUMMARY_COLUMNS, Cursor
from airflow_delay_provider.brokers.ledger.records import AnyRow, MessageRecord, record_of
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED, scheduled_message
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import State

_MESSAGE = scheduled_message.c
_ORDER = (_MESSAGE.deliver_at_ms, _MESSAGE.seq)
_TASK = ("dag_id", "run_id", "task_id")
#: Rows that one page of a list searches at most, for criteria without an index.
SCANNED = 1000
#: The same where nobody waits for a first page: fewer pages cost less.
SCANNED_IN_BULK = 8000
#: Rows that are searched first, for each message that is missing on the page.
FEW = 5
#: More overdue messages are not counted.
MOST_OVERDUE = 10_000

Position = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageFilter:
    """Criteria; a message has to meet all that are given."""

    #: Empty means all.
    states: Sequence[State] = ()
    channel: str | None = None
    #: The connection of its broker, or ``EMBEDDED``.
    destination: str | None = None
    dag_id: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    map_index: int | None = None
    due_from_ms: int | None = None
    #: Exclusive.
    due_to_ms: int | None = None
    #: Part of its id; the whole id of a message finds that message alone.
    id_contains: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Messages in due order, without payloads, and the tokens of the next and the previous page."""

    records: Sequence[MessageRecord]
    next: str | None
    prev: str | None
    #: The page ended before it was full, and this token continues the search; None if nothing is left to search.
    continuation: str | None


def search(
    connection: Connection,
    criteria: MessageFilter,
    *,
    token: str | None = None,
    size: int = 50,
    is_visible: Callable[[MessageRecord], bool] = lambda _record: True,
    scanned: int | None = None,
) -> Found:
    """Return one page of the messages that meet the criteria.

    :param is_visible: leaves out messages that the reader may not see.
    :param scanned: how many rows it searches at most; by default ``SCANNED``.
    """
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise InvalidMessageError("limit", f"{size} is not a page size", f"use 1 to {MAX_PAGE_SIZE}")
    cursor = Cursor.parse(token)
    scan = _Scan(connection, criteria, backwards=cursor is not None and cursor.backwards)
    position = None if cursor is None else (cursor.deliver_at_ms, cursor.seq)
    rows: list[AnyRow] = []
    budget = scanned or SCANNED
    stopped_at: Position | None = None
    while True:
        batch, stopped_at = scan.read(position, size + 1 - len(rows), scanned=budget)
        rows += [row for row in batch if is_visible(record_of(row))]
        # Where rows are tested, one read uses the whole budget.
        budget -= budget if scan.has_unindexed else max(1, len(batch))
        if stopped_at is None or len(rows) > size or budget <= 0:
            break
        position = stopped_at
    is_full = len(rows) > size
    rows = rows[:size]
    if is_full:
        stopped_at = _position(rows[-1])
    return _found(rows, cursor, stopped_at, is_full=is_full)


def count_overdue(
    connection: Connection, *, now_ms: int, channel: str | None = None, destination: str | None = None
) -> tuple[int, int | None]:
    """Return how many scheduled messages are overdue, at most ``MOST_OVERDUE`` + 1, and the earliest due time."""
    criteria = MessageFilter(states=[State.SCHEDULED], channel=channel, destination=destination, due_to_ms=now_ms)
    scan = _Scan(connection, criteria, backwards=False)
    return scan.count(MOST_OVERDUE + 1)


def _found(rows: list[AnyRow], cursor: Cursor | None, stopped_at: Position | None, *, is_full: bool) -> Found:
    """Return the page; ``rows`` are in the order of reading, and ``stopped_at`` is where reading would continue."""
    backwards = cursor is not None and cursor.backwards
    onward = None if stopped_at is None else _token(stopped_at, backwards=backwards)
    back = None
    if cursor is not None:
        # From an empty page, the way back includes the message at which the page before it ended.
        start = _position(rows[0]) if rows else (cursor.deliver_at_ms, cursor.seq + (-1 if backwards else 1))
        back = _token(start, backwards=not backwards)
    records = [record_of(row) for row in (reversed(rows) if backwards else rows)]
    next_token, prev_token = (back, onward) if backwards else (onward, back)
    return Found(records=records, next=next_token, prev=prev_token, continuation=None if is_full else onward)


class _Scan:
    """Reads messages in due order: some index ranges, merged, and criteria that no index serves."""

    def __init__(self, connection: Connection, criteria: MessageFilter, *, backwards: bool) -> None:
        self._connection = connection
        self._criteria = criteria
        self._backwards = backwards
        self._ranges, self._unindexed = _plan(connection, criteria)

    @property
    def has_unindexed(self) -> bool:
        """Whether rows are read that may not meet the criteria."""
        return bool(self._unindexed)

    def read(self, position: Position | None, limit: int, *, scanned: int) -> tuple[list[AnyRow], Position | None]:
        """Return the next rows, and where to continue; None if everything was read."""
        return self._search(position, limit, scanned) if self._unindexed else self._merge(position, limit)

    def count(self, limit: int) -> tuple[int, int | None]:
        """Return the number of rows, at most about ``limit``, and the first due time."""
        total, earliest = 0, list[int]()
        for conditions in self._ranges:
            query = self._range(conditions, None)
            if not self._unindexed:
                query = query.with_only_columns(_MESSAGE.deliver_at_ms)  # the index is enough
            rows = query.limit(limit - total).subquery()
            wanted = [condition(rows.c) for condition in self._unindexed]
            count, first = self._connection.execute(
                select(func.count(), func.min(rows.c.deliver_at_ms)).where(*wanted)
            ).one()
            total += count
            earliest += [] if first is None else [first]
        return total, min(earliest, default=None)

    def _merge(self, position: Position | None, limit: int) -> tuple[list[AnyRow], Position | None]:
        """Read each range as if it had all rows that are wanted."""
        ranges = [
            list(self._connection.execute(self._range(conditions, position).limit(limit)))
            for conditions in self._ranges
        ]
        rows = sorted(chain.from_iterable(ranges), key=_position, reverse=self._backwards)
        is_all = len(rows) <= limit and all(len(each) < limit for each in ranges)
        return rows[:limit], None if is_all else _position(rows[limit - 1])

    def _search(self, position: Position | None, limit: int, scanned: int) -> tuple[list[AnyRow], Position | None]:
        """Read a number of rows in due order, whichever range they are in, and return those that meet the criteria."""
        rows: list[AnyRow] = []
        # Where many rows meet the criteria, a few are enough.
        for n in sorted({min(FEW * limit, scanned), scanned}):
            keys = self._keys(position, n).subquery()
            query = (
                select(*SUMMARY_COLUMNS)
                .join_from(keys, scheduled_message, _MESSAGE.seq == keys.c.seq)
                .where(*(condition(_MESSAGE) for condition in self._unindexed))
                .order_by(*self._order(keys.c))
                .limit(limit)
            )
            rows = list(self._connection.execute(query))
            if len(rows) == limit:
                return rows, _position(rows[-1])
        last = self._connection.execute(self._keys(position, scanned).offset(scanned - 1).limit(1)).one_or_none()
        return rows, None if last is None else _position(last)

    def _keys(self, position: Position | None, limit: int) -> Select[AnyRow]:
        """Return due times and sequence numbers of all ranges, which their indexes contain, in due order."""
        ranges = [
            self._range(conditions, position).with_only_columns(*_ORDER).limit(limit).subquery()
            for conditions in self._ranges
        ]
        merged = union_all(*(select(each) for each in ranges)).subquery()
        return select(merged).order_by(*self._order(merged.c)).limit(limit)

    def _range(self, conditions: Sequence[ColumnElement[bool]], position: Position | None) -> Select[AnyRow]:
        query = select(*SUMMARY_COLUMNS).where(*conditions, *self._due())
        if position is not None:
            here = tuple_(literal(position[0]), literal(position[1]))
            query = query.where(tuple_(*_ORDER) < here if self._backwards else tuple_(*_ORDER) > here)
        return query.order_by(*self._order(_MESSAGE))

    def _order(self, columns: _Columns) -> list[ColumnElement[Any]]:
        order = (columns.deliver_at_ms, columns.seq)
        return [column.desc() for column in order] if self._backwards else [*order]

    def _due(self) -> list[ColumnElement[bool]]:
        since, until = self._criteria.due_from_ms, self._criteria.due_to_ms
        return [
            *([] if since is None else [_MESSAGE.deliver_at_ms >= since]),
            *([] if until is None else [_MESSAGE.deliver_at_ms < until]),
        ]


_Columns = ReadOnlyColumnCollection[str, Any]
_Condition = Callable[[_Columns], ColumnElement[bool]]


def _plan(connection: Connection, criteria: MessageFilter) -> tuple[list[list[ColumnElement[bool]]], list[_Condition]]:
    """Return index ranges that contain all messages that meet the criteria, and the conditions that remain."""
    values = {name: getattr(criteria, name) for name in (*_TASK, "channel", "map_index", "destination")}
    given = {name: value for name, value in values.items() if value is not None}
    states = [state.value for state in criteria.states or tuple(State)]
    is_wanted: list[_Condition] = [lambda columns: columns.state.in_(states)] if criteria.states else []
    if criteria.id_contains is not None and _is_id(connection, criteria.id_contains):
        remaining = [_equals(name, value) for name, value in given.items()]
        return [[_MESSAGE.id == criteria.id_contains]], [*remaining, *is_wanted]
    leading = _leading(given)
    indexed = [_MESSAGE[name] == given.pop(name) for name in leading]
    remaining = [_equals(name, value) for name, value in given.items()]
    if criteria.id_contains is not None:
        text = criteria.id_contains
        remaining.append(lambda columns: contains(connection, columns.id, text))
    if leading == _TASK:
        # Few messages come from one task instance, so one range contains all their states.
        return [indexed], [*remaining, *is_wanted]
    # The index of destinations has separate ranges for messages that the broker holds itself.
    helds = (0, 1) if leading == ("destination",) else (None,)
    ranges = [
        [*indexed, *([] if held is None else [_MESSAGE.held_by_broker == held]), _MESSAGE.state == state]
        for state, held in product(states, helds)
    ]
    return ranges, remaining


def _is_id(connection: Connection, text: str) -> bool:
    """Whether a text is the id of a message. Ids are indexed, but parts of ids are not."""
    return connection.execute(select(_MESSAGE.seq).where(_MESSAGE.id == text)).one_or_none() is not None


def _leading(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the criteria that an index serves, the most selective ones."""
    if given.keys() >= set(_TASK):
        return _TASK
    if given.get("destination") == EMBEDDED:
        given = {name: value for name, value in given.items() if name != "destination"}
    return next(((name,) for name in ("dag_id", "channel", "destination") if name in given), ())


def _equals(name: str, value: Any) -> _Condition:
    if (name, value) == ("destination", EMBEDDED):
        return lambda columns: columns.destination.is_(None)
    return lambda columns: columns[name] == value


def _position(row: AnyRow) -> Position:
    return row.deliver_at_ms, row.seq


def _token(position: Position, *, backwards: bool) -> str:
    return Cursor(backwards=backwards, deliver_at_ms=position[0], seq=position[1]).token
