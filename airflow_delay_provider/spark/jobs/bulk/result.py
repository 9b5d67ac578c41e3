"""What the bulk schedule job has done, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Result:
    """Counts of rows, as the report of the data source has them."""

    rows: int
    #: By what the broker did with the message; empty if nothing was scheduled.
    outcomes: Mapping[str, int] = field(default_factory=dict)
    rejected: int = 0
    rejected_by_column: Mapping[str, int] = field(default_factory=dict)
    first_reasons: Sequence[str] = ()
    #: Whether the same rows can be scheduled again, and none is there twice.
    knows_ids: bool = False
    #: Files with the rejected rows.
    rejects: Sequence[str] | None = None

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Self:
        """Return the counts of a report of the data source."""
        return cls(**{name: report[name] for name in cls.__dataclass_fields__ if name in report})

    def describe(self, seconds: float, *, dry_run: bool) -> str:
        """Return one line for people."""
        parts = [f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()) if count]
        if dry_run:
            parts = [f"{self.rows - self.rejected} can be scheduled"]
        if self.rejected:
            columns = ", ".join(f"{name} {count}" for name, count in sorted(self.rejected_by_column.items()))
            parts.append(f"{self.rejected} rejected{columns and f' ({columns})'}")
        rate = f", {self.rows / seconds:,.0f} rows/s" if seconds > 0 else ""
        return f"{self.rows} rows: {', '.join(parts) or 'nothing to do'}; {seconds:.1f} s{rate}"

    def as_json(self, seconds: float, **more: Any) -> dict[str, Any]:
        """Return the report of the job."""
        return {
            **more,
            "rows": self.rows,
            "outcomes": dict(self.outcomes),
            "rejected": self.rejected,
            "rejected_by_column": dict(self.rejected_by_column),
            "first_reasons": list(self.first_reasons),
            "rejects": self.rejects,
            "seconds": round(seconds, 3),
            "rows_per_second": round(self.rows / seconds, 1) if seconds > 0 else None,
        }
