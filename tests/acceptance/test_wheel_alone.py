"""The wheel with its extra for Spark in a new environment: no package but what it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import wheel_matrix


@pytest.mark.timeout(900)
def test_the_wheel_is_enough_on_the_newest_python_there_is(tmp_path: Path) -> None:
    """All combinations: ``python -m tools.wheel_matrix``."""
    pythons = [found for each in wheel_matrix.PYTHONS if (found := wheel_matrix.find_python(each)) is not None]
    result = wheel_matrix.use(wheel_matrix.build(tmp_path), pythons[-1], "spark")
    assert result == "DID DAG, message, job on Spark 4.2.0"
