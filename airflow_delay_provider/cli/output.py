"""Print tables for people, JSON for programs, and progress on stderr."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.listing import Page
    from airflow_delay_provider.brokers.ledger.records import MessageRecord
    from airflow_delay_provider.domain.lifecycle import JournalEntry
    from airflow_delay_provider.domain.message import Message

PREVIEW_CHARACTERS = 60
#: Without a terminal, tables are as wide as their content, so that scripts read complete cells.
_UNLIMITED_WIDTH = 100_000
SECONDS_BETWEEN_LINES = 5.0

#: Called with the number of lines done so far.
Report = Callable[[int], None]


def iso(moment: datetime | None) -> str | None:
    """Return ISO-8601 in UTC with milliseconds."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def print_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document on one line."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table; None is an empty cell."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    Console(file=sys.stdout, width=width, highlight=False).print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print one field per line."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        sys.stdout.write(f"{name:<{width}}  {_cell(value)}".rstrip() + "\n")


def print_one(output: str, document: Mapping[str, object]) -> None:
    """Print a document in the format that ``--output`` names."""
    (print_document if output == "json" else print_fields)(document)


def print_page_tokens(page: Page) -> None:
    """Print the options that show the neighbouring pages of a list."""
    for name, token in (("next", page.next), ("prev", page.prev)):
        if token is not None:
            sys.stdout.write(f"{name}: --page {token}\n")


def message_fields(message: Message) -> dict[str, Any]:
    """Return a message without its payload."""
    origin = message.origin
    return {
        "message_id": message.id,
        "channel": message.channel,
        "deliver_at": iso(message.deliver_at),
        "key": message.key,
        "headers": dict(message.headers),
        "content_type": message.content_type,
        "priority": message.priority,
        "handled_count": message.handled_count,
        "origin": None
        if origin is None
        else {
            "dag_id": origin.dag_id,
            "run_id": origin.run_id,
            "task_id": origin.task_id,
            "map_index": origin.map_index,
        },
    }


def record_fields(record: MessageRecord) -> dict[str, Any]:
    """Return the ledger's record of a message without its payload."""
    late = record.lateness
    return {
        **message_fields(record.message),
        "state": record.state.name,
        "state_code": record.state.value,
        "scheduled_at": iso(record.scheduled_at),
        "dispatched_at": iso(record.dispatched_at),
        "lateness_seconds": None if late is None else late.total_seconds(),
        "updated_at": iso(record.updated_at),
        "destination": record.destination,
        "hold": "broker" if record.held_by_broker else "ledger",
        "generation": record.generation,
    }


def history_fields(entry: JournalEntry) -> dict[str, Any]:
    """Return one journal entry of a message."""
    return {
        "at": iso(entry.at),
        "change": entry.change.value,
        "deliver_at": iso(entry.deliver_at),
        "reason": entry.reason,
    }


def payload_fields(payload: bytes) -> dict[str, str]:
    """Return the payload unchanged: as text, or in base64 if it is not UTF-8."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def preview(payload: bytes) -> str:
    """Return the beginning of a payload on one line."""
    # A character has at most four bytes, and one that is cut off at the end must not be shown.
    beginning = payload[: 4 * PREVIEW_CHARACTERS]
    text = beginning.decode(errors="ignore" if len(payload) > len(beginning) else "replace")
    return printable(text if len(text) <= PREVIEW_CHARACTERS else f"{text[:PREVIEW_CHARACTERS]}…")


def printable(text: str) -> str:
    """Escape control characters: the content of a message must not control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return printable(json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else str(value))


@contextmanager
def progress(doing: str, *, total: int | None = None) -> Iterator[Report]:
    """Show progress while the block runs: a bar on a terminal, else a line every few seconds."""
    with _bar(doing, total) if sys.stderr.isatty() else _lines(doing, total) as report:
        yield report


@contextmanager
def _bar(doing: str, total: int | None) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _lines(doing: str, total: int | None) -> Iterator[Report]:
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            sys.stderr.write(f"{doing}: {done}{'' if total is None else f' of {total}'} lines\n")

    yield report
