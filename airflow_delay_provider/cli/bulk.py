"""Schedule the messages of a file: the first pass checks all lines, the second writes."""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from airflow_delay_provider.cli.bulk_files import BadLineError, Row, read_rows
from airflow_delay_provider.cli.output import progress
from airflow_delay_provider.domain.arguments import OnConflict, OnPast, compose_message
from airflow_delay_provider.domain.exceptions import DelayError, InvalidMessageError
from airflow_delay_provider.metrics import schedule_and_count

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.port import Broker, Outcome
    from airflow_delay_provider.domain.message import Message

CHUNK_MESSAGES = 1000
CHUNK_BYTES = 8 * 1_048_576
#: JSON may need six bytes for one byte of the payload; the other fields need space too.
_LINE_BYTES_PER_PAYLOAD_BYTE = 6
_LINE_BYTES_BESIDE_PAYLOAD = 1_048_576
_ID_NAMESPACE = UUID("1f0d6f5e-0e5b-4c53-9a5b-6a1c1d0f7d2b")

NumberedMessage = tuple[int, "Message"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkDefaults:
    """Values for lines that do not give their own."""

    channel: str | None
    deliver_at: str | None
    deliver_after: str | None
    on_past: OnPast
    #: The other arguments of ``compose_message``.
    options: Mapping[str, Any]


class UnfinishedFileError(DelayError):
    """Not all lines are confirmed; the cause says why."""


def schedule_file(broker: Broker, path: Path, *, defaults: BulkDefaults, on_conflict: OnConflict) -> Counter[Outcome]:
    """Schedule every line and return the number of messages for each outcome.

    Nothing is written if a line is invalid. A line without an id gets one from the file's content, the line number and
    the channel. So scheduling the same file again creates no duplicates, and repeating an interrupted run completes it.
    """
    file = _BulkFile(path, defaults=defaults, max_payload_bytes=broker.limits.max_payload_bytes)
    lines = _check(file, broker)
    return _write(file, broker, on_conflict, lines=lines)


class _BulkFile:
    """The messages of a file, which is read again for each pass."""

    def __init__(self, path: Path, *, defaults: BulkDefaults, max_payload_bytes: int) -> None:
        self.path = path
        self._defaults = defaults
        self._max_line_bytes = _LINE_BYTES_PER_PAYLOAD_BYTE * max_payload_bytes + _LINE_BYTES_BESIDE_PAYLOAD
        self._digest: str | None = None

    def rows(self) -> Iterator[tuple[int, Row]]:
        return read_rows(self.path, max_line_bytes=self._max_line_bytes)

    def compose(self, line: int, row: Row, *, now: datetime, on_past: OnPast | None = None) -> Message:
        """Return the message of a row; raise an error that names the line if the row is invalid."""
        fields = dict(row)
        try:
            channel = fields.pop("channel", self._defaults.channel)
            if channel is None:
                raise InvalidMessageError("channel", "missing", "add it to the line, or give one for the whole file")
            if "deliver_at" not in fields and "deliver_after" not in fields:
                fields |= {"deliver_at": self._defaults.deliver_at, "deliver_after": self._defaults.deliver_after}
            options = dict(self._defaults.options)
            options["headers"] = options["headers"] | fields.pop("headers", {})
            fields.setdefault("message_id", self._id_of(line, channel))
            return compose_message(
                channel,
                _payload_of(fields),
                now=now,
                on_past=on_past or self._defaults.on_past,
                **(options | fields),
            )
        except InvalidMessageError as error:
            raise BadLineError(self.path, line, error) from None

    def _id_of(self, line: int, channel: str) -> str:
        if self._digest is None:
            with self.path.open("rb") as file:
                self._digest = hashlib.file_digest(file, "sha256").hexdigest()
        return str(uuid5(_ID_NAMESPACE, json.dumps((self._digest, line, channel))))


def _check(file: _BulkFile, broker: Broker) -> int:
    """Raise at the first invalid line, without writing anything; return the number of messages."""
    now = broker.clock.now()
    checked = 0
    with _SeenIds() as seen, progress(f"checking {file.path}") as report:
        for line, row in file.rows():
            message = file.compose(line, row, now=now)
            try:
                broker.limits.check(message, now=now)
                if "message_id" in row:
                    seen.add(message.id, line)
            except InvalidMessageError as error:
                raise BadLineError(file.path, line, error) from None
            checked += 1
            if checked % CHUNK_MESSAGES == 0:
                report(checked)
    return checked


def _write(file: _BulkFile, broker: Broker, on_conflict: OnConflict, *, lines: int) -> Counter[Outcome]:
    outcomes: Counter[Outcome] = Counter()
    # A delivery time that passes between check and write is delivered, whatever on_past says.
    messages = (
        (line, file.compose(line, row, now=broker.clock.now(), on_past=OnPast.DELIVER)) for line, row in file.rows()
    )
    last_line = 0
    with progress(f"scheduling {file.path}", total=lines) as report:
        try:
            for chunk in chunks(messages):
                batch = [message for _, message in chunk]
                receipts = schedule_and_count(broker, batch, on_conflict=on_conflict)
                outcomes.update(receipt.outcome for receipt in receipts)
                last_line = chunk[-1][0]
                report(outcomes.total())
        except (DelayError, KeyboardInterrupt) as error:
            raise _unfinished(file.path, error, outcomes.total(), last_line, on_conflict) from error
    return outcomes


def _unfinished(path: Path, error: BaseException, messages: int, line: int, on_conflict: OnConflict) -> DelayError:
    so_far = f"{messages} messages up to line {line} are confirmed" if messages else "no message is confirmed"
    again = "repeat the command to continue"
    if messages and on_conflict is not OnConflict.KEEP:
        again = "repeat the command with --on-conflict keep to continue"
    return UnfinishedFileError(f"{path}: {so_far}, then: {str(error) or 'interrupted'}; {again}")


def chunks(
    messages: Iterable[NumberedMessage], *, most: int = CHUNK_MESSAGES, most_bytes: int = CHUNK_BYTES
) -> Iterator[list[NumberedMessage]]:
    """Group messages into batches that are limited in number and in bytes."""
    chunk: list[NumberedMessage] = []
    size = 0
    for line, message in messages:
        chunk.append((line, message))
        size += len(message.payload)
        if len(chunk) >= most or size >= most_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _payload_of(fields: dict[str, Any]) -> Any:
    given = fields.keys() & {"payload", "payload_base64"}
    if len(given) != 1:
        raise InvalidMessageError(
            "payload", "given twice" if given else "missing", "give either payload or payload_base64"
        )
    if "payload" in given:
        return fields.pop("payload")
    try:
        return base64.b64decode(fields.pop("payload_base64"), validate=True)
    except ValueError as error:
        raise InvalidMessageError("payload_base64", f"not base64 ({error})", "encode the bytes in base64") from None


class _SeenIds:
    """Finds duplicate ids in bounded memory: SQLite moves large tables into a temporary file."""

    def __enter__(self) -> _SeenIds:
        self._connection = sqlite3.connect("", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=OFF")
        self._connection.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, line INTEGER) WITHOUT ROWID")
        self._connection.execute("BEGIN")
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def add(self, message_id: str, line: int) -> None:
        try:
            self._connection.execute("INSERT INTO seen VALUES (?, ?)", (message_id, line))
        except sqlite3.IntegrityError:
            with closing(self._connection.execute("SELECT line FROM seen WHERE id = ?", (message_id,))) as cursor:
                (earlier,) = cursor.fetchone()
            raise InvalidMessageError(
                "message_id", f"{message_id!r} is also in line {earlier}", "give each message its own id"
            ) from None
