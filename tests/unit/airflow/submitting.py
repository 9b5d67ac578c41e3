"""A program in the place of spark-submit, and the little of Airflow that a Spark operator uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Each run is counted before it does what was planned for it; without a plan it succeeds.
PROGRAM = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> submitted
plan=plan-$(wc -l < submitted)
test -f "$plan" && . "./$plan"
exit 0
"""
REFUSED = "echo 'Caused by: java.net.ConnectException: Connection refused'; exit 1"
WRONG_QUERY = (
    "echo 'pyspark.errors.exceptions.captured.AnalysisException: [TABLE_OR_VIEW_NOT_FOUND] The table or view sales"
    " cannot be found. SQLSTATE: 42P01'; exit 1"
)
OUT_OF_MEMORY = "echo 'java.lang.OutOfMemoryError: Java heap space'; exit 1"
UNHEARD_OF = "echo 'the moon is full'; exit 1"


class SparkSubmit:
    """A program of which it is known how often it ran, and with what."""

    def __init__(self, folder: Path, *plans: str) -> None:
        self._folder = folder
        self.path = str(folder / "spark-submit")
        folder.mkdir(parents=True)
        (folder / "spark-submit").write_text(PROGRAM)
        (folder / "spark-submit").chmod(0o755)
        self.plan(*plans)

    def plan(self, *plans: str) -> None:
        """Say what the first runs do, one after the other."""
        for number, plan in enumerate(plans, start=1):
            (self._folder / f"plan-{number}").write_text(f"{plan}\n")

    @property
    def submissions(self) -> int:
        calls = self._folder / "submitted"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


class TaskStateStore:
    """Keeps JSON as Airflow's does, over tries and deferrals."""

    def __init__(self) -> None:
        self._stored: dict[str, str] = {}

    def get(self, key: str, default: Any = None) -> Any:
        return json.loads(self._stored[key]) if key in self._stored else default

    def set(self, key: str, value: Any) -> None:
        assert value is not None
        self._stored[key] = json.dumps(value)

    def delete(self, key: str) -> None:
        self._stored.pop(key, None)
