"""The part of `airflow delay status` about dispatchers: who runs, since when, and how."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.cli.output import iso, print_table

if TYPE_CHECKING:
    from airflow_delay_provider.ledger.heartbeats import DispatcherRecord, LoopReport

_COLUMNS = ("dispatcher", "status", "version", "started_at", "seen_at", "serves", "problems")


def dispatcher_fields(record: DispatcherRecord) -> dict[str, Any]:
    """Return what the ledger knows of a dispatcher."""
    return {
        "owner": record.owner,
        "status": record.status,
        "host": record.host,
        "pid": record.pid,
        "version": record.version,
        "started_at": iso(record.started_at),
        "seen_at": iso(record.seen_at),
        "seconds_since_seen": record.age.total_seconds(),
        "stopped_at": iso(record.stopped_at),
        "projects": list(record.projects),
        "climbs": list(record.climbs),
        "destinations": list(record.destinations),
        "loops": [_loop_fields(loop) for loop in record.loops],
    }


def print_dispatchers(records: Sequence[DispatcherRecord]) -> None:
    """Print one line a dispatcher; those that are gone stay for a day."""
    if not records:
        return
    sys.stdout.write("\n")
    print_table(_COLUMNS, [_row(record) for record in records])


def _row(record: DispatcherRecord) -> list[object]:
    serves = [
        *(f"--project {conn_id}" for conn_id in record.projects),
        *(f"--climb {conn_id}" for conn_id in record.climbs),
        *(f"sends to {conn_id}" for conn_id in record.destinations),
    ]
    problems = [f"{loop.name} {loop.problem}" for loop in record.loops if loop.problem] if record.is_alive else []
    return [
        record.owner,
        record.status,
        record.version,
        iso(record.started_at),
        iso(record.seen_at),
        ", ".join(["ledger", *serves]),
        "; ".join(problems),
    ]


def _loop_fields(loop: LoopReport) -> dict[str, Any]:
    return {
        "name": loop.name,
        "well": loop.well,
        "succeeded_at": iso(loop.succeeded_at),
        "failures": loop.failures,
        "error": loop.error,
    }
