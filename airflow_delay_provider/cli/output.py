"""What commands print: one table for people, one JSON document for programs."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_delay_provider.domain.journal import JournalEntry
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.ledger.records import MessageRecord

PREVIEW_CHARACTERS = 60
#: Without a terminal a table is as wide as its content: nothing that a script reads is cut.
_UNLIMITED_WIDTH = 100_000


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
    """Print one thing, a line a field."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        sys.stdout.write(f"{name:<{width}}  {_cell(value)}".rstrip() + "\n")


def print_one(output: str, document: Mapping[str, object]) -> None:
    """Print one thing in the form that ``--output`` names."""
    (print_document if output == "json" else print_fields)(document)


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
    """Return what the ledger knows of a message, without its payload."""
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
    """Return one entry of a message's history."""
    return {
        "at": iso(entry.at),
        "change": entry.change.value,
        "deliver_at": iso(entry.deliver_at),
        "reason": entry.reason,
    }


def payload_fields(payload: bytes) -> dict[str, str]:
    """Return the payload byte for byte: as text, or in base64 when it is none."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def preview(payload: bytes) -> str:
    """Return the beginning of a payload on one line."""
    # A character takes at most four bytes, and one cut off at the end must not show.
    beginning = payload[: 4 * PREVIEW_CHARACTERS]
    text = beginning.decode(errors="ignore" if len(payload) > len(beginning) else "replace")
    return printable(text if len(text) <= PREVIEW_CHARACTERS else f"{text[:PREVIEW_CHARACTERS]}…")


def printable(text: str) -> str:
    """Write control characters as escapes: what a message contains must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return printable(json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else str(value))
