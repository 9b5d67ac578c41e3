"""Which items of the checklist have a test, and on which brokers: `python -m tests.coverage_of_items`.

A test names the items that it proves at the beginning of its docstring ("A12, B4" or "A12, B4: why"); an item that a
sentence mentions later is not credited. Sections: A the universal scheduler, B the scheduled message API, C RabbitMQ
delay queues, D time-partitioned delayed delivery, E a scheduler on Kafka topics, M what the project adds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parent
#: What the project adds to the five documents.
ADDED = {
    "M1": "a message is scheduled, dispatched and awaited in a real Airflow",
    "M2": "a failed Spark job is submitted again after a delay, and succeeds",
    "M3": "waiting tasks take no slot, no process and no connection of their own",
    "M4": "Spark, killed at any place, loses no ticket: worker, triggerer, executor, master",
    "M5": "people control messages and Spark retries in the pages of Airflow, with its permissions",
    "M6": "the pages are accessible",
    "M7": "the demo and the examples of the README run",
    "M8": "the wheel alone is enough to install",
    "M9": "killed brokers and dispatchers lose nothing",
    "M10": "Spark jobs schedule, read, dispatch and measure delayed messages",
    "M11": "the compose file starts Airflow, its dispatcher and the brokers",
}
#: How many items each section has.
SECTIONS = {"A": 48, "B": 66, "C": 14, "D": 21, "E": 12, "M": len(ADDED)}
ITEMS = [f"{section}{number}" for section, count in SECTIONS.items() for number in range(1, count + 1)]
BROKERS = ("embedded", "rabbitmq", "kafka")

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
    "M11": "not proven yet: lint validates the file, and nothing starts it",
}
#: What must be proven now: a missing test is a failure.
_REQUIRED = {
    "A": [1, 2, 3, 5, 6, *range(9, 32), *range(36, 43), 44, 45, 46, 48],
    "B": [*range(1, 17), *range(18, 54), *range(56, 63), 64, 65, 66],
    "C": [*range(1, 15)],
    "D": [*range(1, 21)],
    "E": [*range(1, 13)],
    "M": [*range(1, 11)],
}
REQUIRED = [f"{section}{number}" for section, numbers in _REQUIRED.items() for number in numbers]
#: What must be proven on the embedded broker, on RabbitMQ and on Kafka alike.
ON_EVERY_BROKER = [
    *(f"A{n}" for n in (1, 2, 3, 10, 12, 13, 15, 17, 18, 23, 24, 25, 27, 28, 29, 30, 31, 36, 40, 44, 45)),
    *(f"B{n}" for n in (4, 6, 7, 8, 14, 25, 27, 31, 32, 33, 53, 56, 58, 59, 61)),
    *(f"C{n}" for n in (9, 14)),
    *(f"D{n}" for n in (11, 12, 14, 16, 17, 18, 19)),
    *(f"E{n}" for n in (2, 12)),
]
#: Items that only tests of a certain kind can prove: parts of their paths.
_HTTP, _ENTRY_POINTS = ("api",), ("airflow", "cli", "acceptance", "task_run", "security")
ONLY_IN: dict[str, tuple[str, ...]] = {"B1": _HTTP, "B48": _HTTP, "B52": _HTTP, "A48": _ENTRY_POINTS}
#: Suites of the contract, which run on each broker.
_ON_LEDGER = "contract/ledger_held.py"


def items_by_test(folder: Path = TESTS) -> dict[str, list[str]]:
    """Return the items that each test names, by the test's place."""
    return {
        f"{path.relative_to(folder)}::{test.name}": named
        for path in sorted(folder.rglob("*.py"))
        for test in _tests_in(ast.parse(path.read_text()))
        if (named := _named_in(ast.get_docstring(test) or ""))
    }


def find_tests_of_items(named: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the tests of each item that has any, in the order of the checklist."""
    return {item: tests for item in ITEMS if (tests := [test for test, items in named.items() if item in items])}


def brokers_of(tests: Sequence[str]) -> list[str]:
    """Return the brokers on which these tests run, by their places."""
    found = {broker for test in tests for broker in _brokers_of_one(test.partition("::")[0])}
    return [broker for broker in BROKERS if broker in found]


def misplaced(named: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the items that tests name which cannot prove them, by the test's place."""
    found = {
        test: [item for item in items if item in ONLY_IN and not any(part in test for part in ONLY_IN[item])]
        for test, items in named.items()
    }
    return {test: items for test, items in found.items() if items}


def _brokers_of_one(path: str) -> tuple[str, ...]:
    if path == _ON_LEDGER:
        return ("rabbitmq", "kafka")
    if path.startswith("contract/") and not path.startswith("contract/test_"):
        return BROKERS
    return tuple(broker for broker in ("rabbitmq", "kafka") if broker in path) or ("embedded",)


def _named_in(docstring: str) -> list[str]:
    beginning = re.match(r"[A-EM][0-9]{1,3}\b(, [A-EM][0-9]{1,3}\b)*", docstring)
    return beginning[0].split(", ") if beginning else []


def _tests_in(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def main() -> None:
    covered = find_tests_of_items(items_by_test())
    for item, tests in covered.items():
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        print(f"{item:4}{', '.join(brokers_of(tests)):26} {tests[0]}{more}")
    for section, count in SECTIONS.items():
        missing = [item for item in ITEMS if item.startswith(section) and item not in covered]
        print(f"\nSection {section}: {count - len(missing)} of {count} items have a test")
        for item in missing:
            print(f"  {item:4}{REASONS.get(item, 'NO TEST AND NO REASON')}")


if __name__ == "__main__":
    main()
