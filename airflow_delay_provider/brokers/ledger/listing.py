"""Read the ledger: one message, pages, counts, the next due time. The cost does not grow with the number of rows."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import Connection, exists, func, literal, select, tuple_, union_all
from sqlalchemy.sql import ColumnElement, Select

from airflow_delay_provider.brokers.ledger import journal
from airflow_delay_provider.brokers.ledger.dialect import is_one_of
from airflow_delay_provider.brokers.ledger.records import AnyRow, MessageRecord, record_of
from airflow_delay_provider.brokers.ledger.tables import EMBEDDED, message_count, scheduled_message
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.exceptions import InvalidMessageError, UnknownMessageError
from airflow_delay_provider.domain.lifecycle import JournalEntry, State

_MESSAGE = scheduled_message.c
MAX_PAGE_SIZE = 1000
_MAX_NUMBER = 2**63 - 1
#: The columns of a :class:`MessageRecord` without its payload.
SUMMARY_COLUMNS = [
    literal(b"").label("payload") if column.name == "payload" else column
    for column in scheduled_message.columns
    if column.name not in ("claimed_by", "claimed_until_ms")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Messages in due order, without payloads, and the tokens of the next and the previous page."""

    records: Sequence[MessageRecord]
    next: str | None
    prev: str | None


def get(connection: Connection, message_id: str, *, destination: str | None = None) -> MessageRecord:
    """Return one message with its payload; with ``destination``, only one that goes to that connection."""
    record = record_of(_find(connection, select(scheduled_message), message_id))
    if destination not in (None, record.destination):
        raise UnknownMessageError(message_id)
    return record


def get_many(connection: Connection, message_ids: Sequence[str]) -> dict[str, MessageRecord]:
    """Return messages without payloads, by id; unknown ids are left out."""
    if not message_ids:
        return {}
    rows = connection.execute(select(*SUMMARY_COLUMNS).where(is_one_of(connection, _MESSAGE.id, message_ids)))
    return {row.id: record_of(row) for row in rows}


def get_history(connection: Connection, message_id: str) -> list[JournalEntry]:
    """Return everything that happened to one message, oldest first."""
    return journal.history(connection, _find(connection, select(_MESSAGE.seq), message_id).seq)


def get_payloads(connection: Connection, message_ids: Sequence[str]) -> dict[str, bytes]:
    """Return the payloads of a page, by id."""
    if not message_ids:
        return {}
    rows = connection.execute(
        select(_MESSAGE.id, _MESSAGE.payload).where(is_one_of(connection, _MESSAGE.id, message_ids))
    )
    return {row.id: row.payload for row in rows}


def next_scheduled_at(
    connection: Connection, *, channel: str | None = None, destination: str | None = None
) -> datetime | None:
    """Return the earliest due time of the scheduled messages, of one channel or all, for one connection or all."""
    earliest = select(func.min(_MESSAGE.deliver_at_ms)).where(_MESSAGE.state == State.SCHEDULED.value)
    found = [connection.execute(earliest.where(*limits)).scalar() for limits in _limits(channel, destination)]
    due = [each for each in found if each is not None]
    return from_ms(min(due)) if due else None


def page(
    connection: Connection,
    *,
    channel: str | None = None,
    destination: str | None = None,
    states: Sequence[State] = (),
    origin: Mapping[str, str | int] | None = None,
    token: str | None = None,
    size: int = 100,
) -> Page:
    """Return one page. Each state is a separate index range, so every page costs the same.

    :param origin: only messages of tasks with these values; not indexed, so use it for small channels only.
    """
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise InvalidMessageError("limit", f"{size} is not a page size", f"use 1 to {MAX_PAGE_SIZE}")
    cursor = Cursor.parse(token)
    of_tasks = [_MESSAGE[name] == value for name, value in (origin or {}).items()]
    backwards = cursor is not None and cursor.backwards
    stretches = [
        _stretch(state, [*limits, *of_tasks], cursor=cursor, size=size + 1)
        for state in states or tuple(State)
        for limits in _limits(channel, destination)
    ]
    merged = union_all(*(select(stretch.subquery()) for stretch in stretches)).subquery()
    order = (merged.c.deliver_at_ms, merged.c.seq)
    rows = connection.execute(
        select(merged).order_by(*(c.desc() if backwards else c for c in order)).limit(size + 1)
    ).all()
    more, rows = len(rows) > size, rows[:size]
    if backwards:
        rows = rows[::-1]
    has_next, has_prev = (cursor is not None, more) if backwards else (more, cursor is not None)
    return Page(
        records=[record_of(row) for row in rows],
        next=_token(rows[-1], backwards=False) if rows and has_next else None,
        prev=_token(rows[0], backwards=True) if rows and has_prev else None,
    )


def count_by_state(
    connection: Connection, *, channel: str | None = None, destination: str | None = None
) -> dict[State, int]:
    """Return the number of messages in each state, of one channel or of all, for one connection or for all."""
    query = select(message_count.c.state, func.sum(message_count.c.n)).group_by(message_count.c.state)
    if channel is not None:
        query = query.where(message_count.c.channel == channel)
    if destination is not None:
        query = query.where(message_count.c.destination == destination)
    found = {State(state): int(n) for state, n in connection.execute(query)}
    return {state: found.get(state, 0) for state in State}


def count_by_channel(
    connection: Connection, *, destination: str | None = None, after: str | None = None, limit: int | None = None
) -> dict[str, dict[State, int]]:
    """Return the number of messages in each state of each channel, for one connection or for all.

    :param after: only channels behind this one in alphabetical order, at most ``limit`` of them.
    """
    query = (
        select(message_count.c.channel, message_count.c.state, func.sum(message_count.c.n))
        .group_by(message_count.c.channel, message_count.c.state)
        .order_by(message_count.c.channel)
    )
    if destination is not None:
        query = query.where(message_count.c.destination == destination)
    if after is not None:
        query = query.where(message_count.c.channel > after)
    if limit is not None:
        query = query.limit(limit * len(State))
    found: dict[str, dict[State, int]] = {}
    for channel, state, n in connection.execute(query):
        found.setdefault(channel, dict.fromkeys(State, 0))[State(state)] = int(n)
    return dict(islice(found.items(), limit))


def waiting_destinations(connection: Connection) -> list[str]:
    """Return the connections of other brokers that have ledger-held messages to send.

    The counts name the candidates; one index lookup each leaves out those whose messages the broker holds itself.
    """
    message = scheduled_message.c
    to_send = exists().where(
        message.state == State.SCHEDULED.value,
        message.destination == message_count.c.destination,
        message.claimed_until_ms.is_(None),
        message.held_by_broker == 0,
    )
    query = (
        select(message_count.c.destination)
        .where(
            message_count.c.destination != EMBEDDED,
            message_count.c.state == State.SCHEDULED.value,
            message_count.c.n > 0,
            to_send,
        )
        .distinct()
        .order_by(message_count.c.destination)
    )
    return list(connection.execute(query).scalars())


def _limits(channel: str | None, destination: str | None) -> list[list[ColumnElement[bool]]]:
    """Return alternative conditions; each is one index range."""
    of_channel = [] if channel is None else [_MESSAGE.channel == channel]
    if destination is None:
        return [of_channel]
    return [[*of_channel, _MESSAGE.destination == destination, _MESSAGE.held_by_broker == held] for held in (0, 1)]


def _stretch(state: State, limits: Sequence[ColumnElement[bool]], *, cursor: Cursor | None, size: int) -> Select[Any]:
    query = select(*SUMMARY_COLUMNS).where(_MESSAGE.state == state.value, *limits)
    order = (_MESSAGE.deliver_at_ms, _MESSAGE.seq)
    if cursor is None:
        return query.order_by(*order).limit(size)
    position = tuple_(literal(cursor.deliver_at_ms), literal(cursor.seq))
    if cursor.backwards:
        return query.where(tuple_(*order) < position).order_by(*(c.desc() for c in order)).limit(size)
    return query.where(tuple_(*order) > position).order_by(*order).limit(size)


def _token(row: AnyRow, *, backwards: bool) -> str:
    return Cursor(backwards=backwards, deliver_at_ms=row.deliver_at_ms, seq=row.seq).token


def _find(connection: Connection, query: Select[*tuple[Any, ...]], message_id: str) -> AnyRow:
    row = connection.execute(query.where(_MESSAGE.id == message_id)).one_or_none()
    if row is None:
        raise UnknownMessageError(message_id)
    return row


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A position between two messages, and the direction in which the page lies."""

    backwards: bool
    deliver_at_ms: int
    seq: int

    @classmethod
    def parse(cls, token: str | None) -> Cursor | None:
        """Return the position of a page token."""
        if token is None:
            return None
        try:
            direction, *numbers = base64.urlsafe_b64decode(token.encode()).decode().split(":")
            due, seq = (int(number) for number in numbers)
            if max(abs(due), abs(seq)) > _MAX_NUMBER:
                raise ValueError("out of range")
            return cls(backwards={"<": True, ">": False}[direction], deliver_at_ms=due, seq=seq)
        except (ValueError, KeyError):
            raise InvalidMessageError(
                "page", f"{token!r} is not a page token", "use one that a listing printed"
            ) from None

    @property
    def token(self) -> str:
        """The page token of this position."""
        text = f"{'<' if self.backwards else '>'}:{self.deliver_at_ms}:{self.seq}"
        return base64.urlsafe_b64encode(text.encode()).decode()
