"""The attempts of a Spark task as a table for its log."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_delay_provider.spark.history import Attempt, History

_COLUMNS = ("attempt", "started (UTC)", "took", "exit", "verdict", "rule", "reason")


def attempt_table(history: History) -> Iterator[str]:
    """Yield the lines."""
    rows = [_COLUMNS, *(_row(attempt) for attempt in history.attempts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(attempt: Attempt) -> tuple[str, ...]:
    took = "" if attempt.ended_at is None else f"{(attempt.ended_at - attempt.started_at).total_seconds():.0f} s"
    return (
        str(attempt.number),
        f"{attempt.started_at:%Y-%m-%d %H:%M:%S}",
        took,
        "" if attempt.exit_code is None else str(attempt.exit_code),
        "" if attempt.verdict is None else attempt.verdict.value,
        attempt.rule,
        attempt.reason,
    )
