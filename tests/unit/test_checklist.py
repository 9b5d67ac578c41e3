from __future__ import annotations

from pathlib import Path

import pytest

from tests.coverage_of_items import ITEMS, REASONS, REQUIRED, SECTIONS, find_tests_of_items, items_by_test


@pytest.fixture(scope="module")
def named() -> dict[str, list[str]]:
    return items_by_test()


def test_the_checklist_has_161_items():
    assert SECTIONS == {"A": 48, "B": 66, "C": 14, "D": 21, "E": 12}
    assert len(ITEMS) == 161


def test_every_item_that_a_test_names_exists(named: dict[str, list[str]]):
    unknown = {test: sorted(set(items) - set(ITEMS)) for test, items in named.items() if set(items) - set(ITEMS)}
    assert unknown == {}


def test_every_required_item_has_a_test(named: dict[str, list[str]]):
    assert set(REQUIRED) <= set(ITEMS)
    assert sorted(set(REQUIRED) - set(find_tests_of_items(named))) == []


def test_every_item_has_a_test_or_a_reason(named: dict[str, list[str]]):
    assert set(REASONS) <= set(ITEMS)
    assert not set(REASONS) & set(REQUIRED)
    assert sorted(set(ITEMS) - set(find_tests_of_items(named)) - set(REASONS)) == []


def test_items_are_read_from_the_docstrings_of_tests_only(tmp_path: Path):
    (tmp_path / "test_some.py").write_text(
        'def test_one():\n    """A1, B22: and why."""\n'
        'class TestMore:\n    """A2"""\n    async def test_two(self):\n        """E12"""\n        x = "A3"\n'
        'def helper():\n    """A4"""\n'
    )
    assert items_by_test(tmp_path) == {"test_some.py::test_one": ["A1", "B22"], "test_some.py::test_two": ["E12"]}
