"""The fuzz of the ladder in short; `python -m tests.acceptance.kafka_fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.kafka_fuzz import Fuzz, fuzz
from tests.kafkas import require_kafka

pytestmark = pytest.mark.timeout(300)

#: On a machine that runs other tests too.
LATE_MS = 5_000


def test_after_any_writes_to_the_ladder_the_dispatcher_continues_and_nothing_vanishes(tmp_path: Path) -> None:
    """B37, E11"""
    figures = fuzz(Fuzz(records=1_500, rate=500, control_seconds=1, seed=11), require_kafka(), tmp_path)
    assert (figures.vanished, figures.stuck) == ([], [])
    assert figures.due.keys() == figures.seen.keys()
    assert figures.lateness_ms(fuzzed=True)[-1] < LATE_MS
    assert not figures.was_restarted
    assert figures.failures_reported == 0
