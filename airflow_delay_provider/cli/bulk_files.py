"""Read JSON Lines and CSV files of any length, line by line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from airflow_delay_provider.domain.exceptions import InvalidMessageError

#: The fields of a line and their JSON types; CSV cells are text.
FIELDS: Mapping[str, tuple[type, ...]] = {
    "channel": (str,),
    "payload": (object,),
    "payload_base64": (str,),
    "deliver_at": (str,),
    "deliver_after": (int, float, str),
    "message_id": (str,),
    "key": (str,),
    "headers": (dict,),
    "content_type": (str,),
    "priority": (int, str),
}
_KINDS: Mapping[type, str] = {str: "text", dict: "an object", int: "a number", float: "a number"}
_NAMES = ", ".join(FIELDS)

Row = Mapping[str, Any]


class BadLineError(InvalidMessageError):
    """A line that cannot be scheduled. Names the file, the line, the field and the remedy."""

    def __init__(self, path: Path, line: int, error: InvalidMessageError) -> None:
        Exception.__init__(self, f"{path}, line {line}: {error}")
        self.field = error.field


def read_rows(path: Path, *, max_line_bytes: int) -> Iterator[tuple[int, Row]]:
    """Yield number and fields of each line, without loading the whole file into memory."""
    read = _reader_of(path)
    try:
        with path.open("rb") as file:
            lines = _Lines(iter(lambda: file.readline(max_line_bytes), b""), max_line_bytes)
            try:
                yield from read(lines)
            except InvalidMessageError as error:
                raise BadLineError(path, lines.first, error) from None
    except OSError as error:
        raise InvalidMessageError(
            "file", f"{path} cannot be read ({error.strerror})", "name a file that you can read"
        ) from None


class _Lines:
    """Decodes lines one by one and tracks where the current row began."""

    def __init__(self, lines: Iterator[bytes], max_line_bytes: int) -> None:
        self._lines = lines
        self._max_line_bytes = max_line_bytes
        self._number = 0
        self.first = 1

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self._number += 1
            if len(line) == self._max_line_bytes and not line.endswith(b"\n"):
                raise InvalidMessageError(
                    "payload", f"the line exceeds {self._max_line_bytes} bytes", "send a reference to the data"
                )
            try:
                # Spreadsheets put a byte order mark before the first line.
                yield line.decode("utf-8-sig" if self._number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InvalidMessageError("file", f"not UTF-8 ({error.reason})", "save the file as UTF-8") from None

    def begin_row(self) -> int:
        """Start a new row and return the line number of the previous one."""
        first, self.first = self.first, self._number + 1
        return first


def _reader_of(path: Path) -> Callable[[_Lines], Iterator[tuple[int, Row]]]:
    if path.exists() and not path.is_file():
        raise InvalidMessageError("file", f"{path} is not a regular file", "save it to disk first: it is read twice")
    try:
        return {".jsonl": _read_json_lines, ".ndjson": _read_json_lines, ".csv": _read_csv}[path.suffix.lower()]
    except KeyError:
        raise InvalidMessageError(
            "file", f"{path} is neither JSON Lines nor CSV", "name it .jsonl, .ndjson or .csv"
        ) from None


def _read_json_lines(lines: _Lines) -> Iterator[tuple[int, Row]]:
    for line in lines:
        if not line.isspace():
            yield lines.first, _check_types(_parse_object(line))
        lines.begin_row()


def _parse_object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidMessageError("line", f"not JSON ({error})", "write one JSON object per line") from None
    if not isinstance(row, dict):
        raise InvalidMessageError("line", f"{type(row).__name__} is not an object", "write one JSON object per line")
    _refuse_unknown(row)
    return row


def _check_types(row: dict[str, Any]) -> Row:
    for name, value in row.items():
        allowed = FIELDS[name]
        if object not in allowed and value is not None and (not isinstance(value, allowed) or isinstance(value, bool)):
            kinds = " or ".join(dict.fromkeys(_KINDS[kind] for kind in allowed))
            raise InvalidMessageError(name, f"{json.dumps(value)} has the wrong type", f"use {kinds}")
    return {name: value for name, value in row.items() if name == "payload" or value is not None}


def _read_csv(lines: _Lines) -> Iterator[tuple[int, Row]]:
    # Lines are limited already, so fields need no limit of their own.
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(lines, strict=True)
    try:
        columns = next(reader, [])
        _refuse_unknown(dict.fromkeys(columns))
        if len(set(columns)) < len(columns):
            raise InvalidMessageError("line", "a column name occurs twice", "give each column its own name")
        lines.begin_row()
        for cells in reader:
            if cells:
                yield lines.first, _row_of_cells(columns, cells)
            lines.begin_row()
    except csv.Error as error:
        raise InvalidMessageError("line", f"not CSV ({error})", 'quote cells with " and double each " inside') from None


def _row_of_cells(columns: list[str], cells: list[str]) -> Row:
    if len(cells) != len(columns):
        raise InvalidMessageError(
            "line", f"{len(cells)} cells for {len(columns)} columns", "quote cells that contain commas or line breaks"
        )
    row: dict[str, Any] = {name: cell for name, cell in zip(columns, cells, strict=True) if cell or name == "payload"}
    if "payload_base64" in row and not row.get("payload"):
        row.pop("payload", None)
    if "headers" in row:
        try:
            row["headers"] = json.loads(row["headers"])
        except ValueError:
            row["headers"] = None
        if not isinstance(row["headers"], dict):
            raise InvalidMessageError("headers", "not a JSON object", 'write them as {"name": "value"}')
    return row


def _refuse_unknown(row: Mapping[str, Any]) -> None:
    for name in row:
        if name not in FIELDS:
            raise InvalidMessageError("line", f"{name!r} is not a field of a message", f"use {_NAMES}")
