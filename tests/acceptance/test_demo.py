"""The first thing that a newcomer runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_the_demo_shows_its_messages_a_spark_job_that_comes_back_and_the_pipeline_and_ends_by_itself() -> None:
    """M7"""
    done = subprocess.run(
        [sys.executable, "demo/run.py", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=840
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for step, times in {
        "scheduled message": 4,
        "remind_and_wait is deferred; worker slots taken: 0": 1,
        "and received": 4,
        "remind_and_wait was resumed by the dispatch: success": 1,
        "  transient  connection-refused  ": 2,
        "task count_orders is deferred; worker slots taken: 0 of 128; processes of its job: 0": 1,
        "brings attempt 2 at": 1,
        "attempt 2 has succeeded in the same try of the task: orders open: 333, orders paid: 667": 1,
        "301 rows: 300 messages scheduled, 1 row rejected, ": 1,
        "all 300 messages of channel bulk are dispatched": 1,
        "| bulk |": 1,
        "the report with plots: ": 1,
    }.items():
        assert done.stdout.count(step) == times, done.stdout
    page = Path(done.stdout.partition("the report with plots: ")[2].splitlines()[0])
    assert "bulk" in page.read_text()
