"""Arrow columns to messages: whole columns where that is possible, and a reject for each row that is invalid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_delay_provider.domain.arguments import MAX_PRIORITY, OnPast, parse_delay, parse_moment
from airflow_delay_provider.domain.clock import EPOCH
from airflow_delay_provider.domain.exceptions import InvalidMessageError, PastDeliveryError
from airflow_delay_provider.domain.message import Message, require_aware
from airflow_delay_provider.spark.datasource.derived_ids import derive_ids

if TYPE_CHECKING:
    from airflow_delay_provider.spark.datasource.options import WriteOptions

ONE_US = timedelta(microseconds=1)
#: Of payload columns of type string, and of type binary.
TEXT, BINARY = "text/plain; charset=utf-8", "application/octet-stream"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What became of the rows of a batch."""

    messages: list[Message]
    #: The row of each message.
    numbers: list[int]
    #: What is wrong with each of the other rows.
    errors: dict[int, InvalidMessageError]


@dataclass(kw_only=True, slots=True)
class _Columns:
    """The columns of one batch, and the errors of its rows; the first error of a row counts."""

    batch: pa.RecordBatch
    errors: dict[int, InvalidMessageError] = field(default_factory=dict)

    def find(self, name: str) -> pa.Array | None:
        """Return a column; None if it is missing or empty."""
        index = self.batch.schema.get_field_index(name)
        if index < 0 or self.batch.column(index).null_count == self.batch.num_rows:
            return None
        return self.batch.column(index)

    def texts(self, name: str) -> Sequence[str | None] | None:
        """Return a column of text; None if it is missing or empty."""
        column = self.find(name)
        if column is None:
            return None
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return [self._decode(name, row, value) for row, value in enumerate(_as_bytes(column))]
        texts: list[str | None] = column.to_pylist()
        return texts

    def refuse(self, row: int, field: str, problem: str, remedy: str) -> None:
        """Record what is wrong with a row."""
        self.errors.setdefault(row, InvalidMessageError(field, problem, remedy))

    def _decode(self, name: str, row: int, value: bytes | None) -> str | None:
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError as error:
            self.refuse(row, name, f"is not UTF-8 ({error.reason})", "convert the text, or use a binary payload")
            return None


class MessageColumns:
    """Makes messages of the batches of a task."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def read(self, batch: pa.RecordBatch, *, now: datetime) -> Rows:
        """Return a message for each row that can be one, and the errors of all others.

        ``now`` is the moment from which ``deliver_after`` counts.
        """
        columns, absent = _Columns(batch=batch), [None] * batch.num_rows
        channels = self._channels(columns)
        payloads, content_type = _payloads(columns)
        at, after = _instants(columns), _delays(columns)
        due = _due_times(columns, at, after, now=now, on_past=self._options.on_past)
        keys = columns.texts("key")
        headers = _headers(columns)
        content_types = columns.texts("content_type")
        priorities = _priorities(columns)
        ids = _given_ids(columns) or derive_ids(
            self._options.id_prefix,
            {
                "channel": channels,
                "content_type": content_types,
                "deliver_after": after,
                "deliver_at": at,
                "headers": headers,
                "key": keys,
                "payload": payloads,
                "priority": priorities,
            },
            rows=batch.num_rows,
        )
        return _compose(
            columns.errors,
            zip(
                ids,
                channels,
                payloads,
                due,
                keys or absent,
                headers or absent,
                content_types or absent,
                priorities or absent,
                strict=True,
            ),
            content_type,
        )

    def _channels(self, columns: _Columns) -> Sequence[str | None]:
        default = self._options.channel
        channels = columns.texts("channel") or [None] * columns.batch.num_rows
        if None not in channels:
            return channels
        if default is None:
            for row, channel in enumerate(channels):
                if channel is None:
                    columns.refuse(row, "channel", "is missing", "give the row one, or set the option channel")
            return channels
        return [default if channel is None else channel for channel in channels]


def _compose(errors: dict[int, InvalidMessageError], rows: Iterable[tuple[Any, ...]], default_type: str) -> Rows:
    """Make a message of each row without an error."""
    messages, numbers = list[Message](), list[int]()
    for row, (message_id, channel, payload, due, key, headers, content_type, priority) in enumerate(rows):
        if row in errors:
            continue
        try:
            message = Message(
                channel=channel,
                payload=payload,
                deliver_at=due,
                id=message_id,
                key=key,
                headers=headers or {},
                content_type=content_type or default_type,
                priority=priority or 0,
            )
        except InvalidMessageError as error:
            errors[row] = error
        else:
            messages.append(message)
            numbers.append(row)
    return Rows(messages=messages, numbers=numbers, errors=errors)


def _given_ids(columns: _Columns) -> Sequence[str | None] | None:
    """Return the column of ids; None if there is none."""
    if columns.batch.schema.get_field_index("id") < 0:
        return None
    ids = columns.texts("id") or [None] * columns.batch.num_rows
    for row, message_id in enumerate(ids):
        if not message_id:
            columns.refuse(row, "id", "is missing", "give the row one, or drop the column to derive ids from the rows")
    return ids


def _payloads(columns: _Columns) -> tuple[Sequence[bytes | None], str]:
    """Return the payloads as bytes, and the content type of those that have none of their own."""
    column = columns.batch.column("payload")
    is_text = not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type))
    if is_text:
        # For its check of the encoding.
        columns.texts("payload")
    payloads = _as_bytes(column)
    if column.null_count:
        for row, payload in enumerate(payloads):
            if payload is None:
                columns.refuse(row, "payload", "is missing", "give the row one; an empty text is allowed")
    return payloads, TEXT if is_text else BINARY


def _as_bytes(column: pa.Array) -> list[bytes | None]:
    if pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    elif pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    values: list[bytes | None] = column.to_pylist()
    return values


def _instants(columns: _Columns) -> list[int | None] | None:
    """Return ``deliver_at`` in microseconds since the epoch."""
    column = columns.find("deliver_at")
    if column is None:
        return None
    if pa.types.is_timestamp(column.type):
        return _as_microseconds(column)
    texts = columns.texts("deliver_at") or ()
    return [None if text is None else _instant_of(columns, row, text) for row, text in enumerate(texts)]


def _instant_of(columns: _Columns, row: int, text: str) -> int | None:
    try:
        return (require_aware("deliver_at", parse_moment("deliver_at", text)) - EPOCH) // ONE_US
    except InvalidMessageError as error:
        columns.errors.setdefault(row, error)
        return None


def _delays(columns: _Columns) -> list[int | None] | None:
    """Return ``deliver_after`` in microseconds."""
    column = columns.find("deliver_after")
    if column is None:
        return None
    if pa.types.is_duration(column.type):
        return _as_microseconds(column)
    return [None if value is None else _delay_of(columns, row, value) for row, value in enumerate(column.to_pylist())]


def _delay_of(columns: _Columns, row: int, seconds: float) -> int | None:
    try:
        return parse_delay("deliver_after", seconds) // ONE_US
    except InvalidMessageError as error:
        columns.errors.setdefault(row, error)
        return None


def _as_microseconds(column: pa.Array) -> list[int | None]:
    """Return timestamps or durations as numbers; Arrow counts timestamps in UTC, whatever zone it shows them in."""
    kind = pa.duration("us") if pa.types.is_duration(column.type) else pa.timestamp("us", column.type.tz)
    numbers: list[int | None] = column.cast(kind).cast(pa.int64()).to_pylist()
    return numbers


def _due_times(
    columns: _Columns, at: list[int | None] | None, after: list[int | None] | None, *, now: datetime, on_past: OnPast
) -> Iterator[datetime | None]:
    """Return when each row is due: exact, but whole milliseconds if that time has passed.

    Rounded up, as messages round it, a time that has passed could be in the future, and the message would wait.
    """
    now_us = (now - EPOCH) // ONE_US
    rows = columns.batch.num_rows
    for row, (at_us, after_us) in enumerate(zip(at or repeat(None, rows), after or repeat(None, rows), strict=True)):
        due_us = at_us if after_us is None else now_us + after_us
        if due_us is None or (at_us is not None and after_us is not None):
            _refuse_times(columns, row, is_missing=due_us is None)
            yield None
        elif due_us <= now_us:
            yield _past(columns, row, due_us, now_us, on_past)
        else:
            yield _moment(columns, row, -(-due_us // 1000) * 1000)


def _past(columns: _Columns, row: int, due_us: int, now_us: int, on_past: OnPast) -> datetime | None:
    due = _moment(columns, row, due_us // 1000 * 1000)
    if due is not None and due_us < now_us and on_past is OnPast.FAIL:
        columns.errors.setdefault(
            row,
            PastDeliveryError(
                "deliver_at", f"{due.isoformat()} has passed", "choose a later time, or use onPast=deliver"
            ),
        )
    return due


def _moment(columns: _Columns, row: int, microseconds: int) -> datetime | None:
    try:
        return EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        columns.refuse(row, "deliver_at", "the time is out of range", "use a year from 1 to 9999")
        return None


def _refuse_times(columns: _Columns, row: int, *, is_missing: bool) -> None:
    if is_missing:
        columns.refuse(row, "deliver_at", "is missing", "give the row a time, or a delay in deliver_after")
    else:
        columns.refuse(row, "deliver_at", "deliver_after is given, too", "give only one of them")


def _headers(columns: _Columns) -> list[dict[str, str] | None] | None:
    column = columns.find("headers")
    if column is None:
        return None
    return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]


def _priorities(columns: _Columns) -> Sequence[int | None] | None:
    column = columns.find("priority")
    if column is None:
        return None
    priorities: list[int | None] = column.to_pylist()
    for row, priority in enumerate(priorities):
        if priority is not None and not 0 <= priority <= MAX_PRIORITY:
            columns.refuse(row, "priority", f"{priority} is out of range", f"use 0 to {MAX_PRIORITY}")
    return priorities
