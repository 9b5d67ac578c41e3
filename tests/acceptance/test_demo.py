"""The first thing that a newcomer runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_shows_its_messages_from_scheduling_to_receiving_and_ends_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "demo/run.py", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for step, times in {
        "scheduled message": 4,
        "remind_and_wait is deferred; worker slots taken: 0": 1,
        "and received": 4,
        "remind_and_wait was resumed by the dispatch: success": 1,
    }.items():
        assert done.stdout.count(step) == times, done.stdout
