"""Everything that the package imports is declared, pinned and explained."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.unit.test_imports import MODULES, PACKAGE, imports_of, name_of, rule_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Which extras a part of the package needs; everything else works with the core dependencies.
EXTRA_OF = {
    "brokers/ledger": "postgres",
    "brokers/rabbitmq": "rabbitmq",
    "brokers/kafka": "kafka",
    "spark": "spark",
    "spark/datasource/kafka_journal.py": "kafka spark",
    "spark/streaming": "kafka spark",
    "operators/spark.py": "spark",
    "testing": "testing",
}


def names_in(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


CORE = names_in(PROJECT["dependencies"])
EXTRAS = {name: names_in(packages) for name, packages in PROJECT["optional-dependencies"].items() if name != "all"}
DECLARED = CORE.union(*EXTRAS.values())


#: Reading all metadata of an environment takes a while.
installed = cache(packages_distributions)


def distributions_of(imported: str) -> set[str]:
    """Return the packages that an import may come from; empty for the standard library and for this package."""
    top, *rest = imported.split(".")
    if top in sys.stdlib_module_names or top == PACKAGE:
        return set()
    if top == "airflow":
        # All of Airflow shares one name: a provider is a package of its own, the rest comes with apache-airflow.
        return {"apache-airflow-providers-" + "-".join(rest[1:3])} if rest[0] == "providers" else {"apache-airflow"}
    return {name.lower().replace("_", "-") for name in installed()[top]}


def third_party_imports() -> Iterator[tuple[Path, str]]:
    for module in MODULES:
        for imported in imports_of(module):
            if distributions_of(imported):
                yield module, imported


def of_extras(names: str) -> set[str]:
    return set().union(*(EXTRAS[name] for name in names.split()))


def test_every_import_is_declared_by_a_dependency_or_by_the_extra_of_its_part() -> None:
    undeclared = [
        f"{name_of(module)} imports {imported}"
        for module, imported in third_party_imports()
        if not distributions_of(imported) & (CORE | of_extras(EXTRA_OF.get(rule_of(module, EXTRA_OF), "")))
    ]
    assert undeclared == []


def test_all_is_every_extra_that_runs() -> None:
    [everything] = PROJECT["optional-dependencies"]["all"]
    assert set(re.findall(r"\[(.*)\]", everything)[0].split(",")) == set(EXTRAS) - {"testing"}


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_a_dependency_is_pinned_and_has_its_reason(name: str) -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    assert name in pinned
    assert re.search(rf"^\|.*\b{re.escape(name)}\b", reasons, flags=re.MULTILINE)
