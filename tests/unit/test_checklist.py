from __future__ import annotations

from pathlib import Path

import pytest

from tests.coverage_of_items import (
    ADDED,
    BROKERS,
    ITEMS,
    ON_EVERY_BROKER,
    REASONS,
    REQUIRED,
    SECTIONS,
    brokers_of,
    find_tests_of_items,
    items_by_test,
    misplaced,
)


@pytest.fixture(scope="module")
def named() -> dict[str, list[str]]:
    return items_by_test()


def test_the_checklist_has_161_items_of_the_documents_and_those_that_the_project_adds():
    assert {"A": 48, "B": 66, "C": 14, "D": 21, "E": 12, "M": len(ADDED)} == SECTIONS
    assert list(ADDED) == [item for item in ITEMS if item.startswith("M")]
    assert len(ITEMS) == 161 + len(ADDED)


def test_every_item_that_a_test_names_exists(named: dict[str, list[str]]):
    unknown = {test: sorted(set(items) - set(ITEMS)) for test, items in named.items() if set(items) - set(ITEMS)}
    assert unknown == {}


def test_every_required_item_has_a_test(named: dict[str, list[str]]):
    assert set(REQUIRED) <= set(ITEMS)
    assert sorted(set(REQUIRED) - set(find_tests_of_items(named))) == []


def test_what_holds_on_every_broker_is_tested_on_every_broker(named: dict[str, list[str]]):
    assert set(ON_EVERY_BROKER) <= set(REQUIRED)
    tests = find_tests_of_items(named)
    untested = {item: sorted(set(BROKERS) - set(brokers_of(tests[item]))) for item in ON_EVERY_BROKER}
    assert {item: brokers for item, brokers in untested.items() if brokers} == {}


def test_no_test_names_an_item_that_it_cannot_prove(named: dict[str, list[str]]):
    assert misplaced(named) == {}
    assert misplaced({"unit/api/test_a.py::test_a": ["B1", "A1"]}) == {}
    assert misplaced({"unit/domain/test_a.py::test_a": ["B1", "A1"]}) == {"unit/domain/test_a.py::test_a": ["B1"]}


def test_brokers_are_known_by_the_place_of_a_test():
    assert brokers_of(["unit/domain/test_a.py::test_a"]) == ["embedded"]
    assert brokers_of(["integration/test_kafka_cli.py::test_a"]) == ["kafka"]
    assert brokers_of(["contract/journal.py::test_a"]) == list(BROKERS)
    assert brokers_of(["contract/ledger_held.py::test_a", "contract/test_embedded.py::test_a"]) == list(BROKERS)


def test_every_item_has_a_test_or_a_reason(named: dict[str, list[str]]):
    assert set(REASONS) <= set(ITEMS)
    assert not set(REASONS) & set(REQUIRED)
    assert sorted(set(ITEMS) - set(find_tests_of_items(named)) - set(REASONS)) == []


def test_items_are_read_from_the_docstrings_of_tests_only(tmp_path: Path):
    (tmp_path / "test_some.py").write_text(
        'def test_one():\n    """A1, B22: and why."""\n'
        'class TestMore:\n    """A2"""\n    async def test_two(self):\n        """E12: unlike A5"""\n        x = "A3"\n'
        'def helper():\n    """A4"""\n'
    )
    assert items_by_test(tmp_path) == {"test_some.py::test_one": ["A1", "B22"], "test_some.py::test_two": ["E12"]}
