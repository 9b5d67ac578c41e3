"""Which items of the checklist have a test: `python -m tests.coverage_of_items`.

A test names the items it proves in its docstring ("A12, B4"). Sections: A the universal scheduler, B the scheduled
message API, C RabbitMQ delay queues, D time-partitioned delayed delivery, E a scheduler on Kafka topics.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

TESTS = Path(__file__).parent
#: How many items each section has.
SECTIONS = {"A": 48, "B": 66, "C": 14, "D": 21, "E": 12}
ITEMS = [f"{section}{number}" for section, count in SECTIONS.items() for number in range(1, count + 1)]

_THEIR_CODE = "a constraint of the system it was written for"
#: Why an item has no test yet, or never will.
REASONS = {
    "A4": "one concurrency model a component; only triggers are asynchronous",
    "A7": "out of scope: Azure Service Bus",
    "A8": "out of scope: SQS",
    **dict.fromkeys(("A32", "A33", "A34", "A35"), _THEIR_CODE),
    "A43": "measured by the benchmarks",
    "A47": "a contradiction, resolved: refuse (A12)",
    "B17": "channels are names, not rows: no foreign keys",
    "B54": "tests wait on conditions, never for a fixed time",
    "B55": "recurring work is Airflow's own schedule",
    "B63": "a contradiction, resolved: no minimum delay unless configured",
    "D21": "this suite",
}
#: What must be proven now, on the ledger, on RabbitMQ and on Kafka: a missing test is a failure.
_REQUIRED = {
    "A": [1, 2, 3, 5, 6, *range(9, 32), *range(36, 43), 44, 45, 46, 48],
    "B": [*range(1, 17), *range(18, 54), *range(56, 63), 64, 65, 66],
    "C": [*range(1, 15)],
    "D": [*range(1, 21)],
    "E": [*range(1, 13)],
}
REQUIRED = [f"{section}{number}" for section, numbers in _REQUIRED.items() for number in numbers]


def items_by_test(folder: Path = TESTS) -> dict[str, list[str]]:
    """Return the items that each test names, by the test's place."""
    return {
        f"{path.relative_to(folder)}::{test.name}": named
        for path in sorted(folder.rglob("*.py"))
        for test in _tests_in(ast.parse(path.read_text()))
        if (named := re.findall(r"\b[A-E][0-9]{1,3}\b", ast.get_docstring(test) or ""))
    }


def find_tests_of_items(named: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the tests of each item that has any, in the order of the checklist."""
    return {item: tests for item in ITEMS if (tests := [test for test, items in named.items() if item in items])}


def _tests_in(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def main() -> None:
    covered = find_tests_of_items(items_by_test())
    for item, tests in covered.items():
        print(f"{item:4}{tests[0]}" + (f" and {len(tests) - 1} more" if len(tests) > 1 else ""))
    for section, count in SECTIONS.items():
        missing = [item for item in ITEMS if item.startswith(section) and item not in covered]
        print(f"\nSection {section}: {count - len(missing)} of {count} items have a test")
        for item in missing:
            print(f"  {item:4}{REASONS.get(item, 'NO TEST AND NO REASON')}")


if __name__ == "__main__":
    main()
