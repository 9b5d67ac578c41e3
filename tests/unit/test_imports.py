"""Imports point one way, and importing has no effect."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import airflow_delay_provider

PACKAGE = "airflow_delay_provider"
ROOT = Path(airflow_delay_provider.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

#: What each part may import of the others; a path names one file that may do more than its part.
ALLOWED = {
    "domain": "",
    "brokers": "domain",
    "dispatcher": "domain brokers",
    "dispatcher/__main__.py": "domain brokers hooks",
    "metrics.py": "domain brokers",
    "hooks": "domain brokers metrics",
    "links.py": "hooks",
    "spark": "domain",
    "spark/tickets.py": "domain hooks",
    "spark/admission.py": "domain brokers hooks triggers",
    "spark/process/job_environment.py": "domain hooks spark",
    "triggers": "domain brokers hooks spark",
    "operators": "domain brokers hooks triggers links metrics spark",
    "sensors": "domain brokers hooks triggers links metrics spark",
    # The pipeline: what runs inside of Spark.
    "spark/connection.py": "domain brokers hooks",
    "spark/datasource": "domain brokers spark",
    "spark/inbox": "domain brokers spark",
    "spark/kafka_sink.py": "domain brokers spark",
    "spark/jobs": "domain brokers spark",
    "spark/streaming": "domain brokers spark",
    "spark/group.py": "domain hooks operators sensors spark",
    "decorators": "operators",
    "api": "domain brokers hooks spark",
    "plugins": "api",
    "cli": "domain brokers dispatcher hooks metrics spark",
    "testing": "domain brokers",
    "connection_forms.py": "",
    "get_provider_info.py": "connection_forms",
    "__init__.py": "domain hooks operators sensors spark",
}
#: The parts that live in Airflow.
MAY_IMPORT_AIRFLOW = {
    "hooks",
    "operators",
    "sensors",
    "triggers",
    "decorators",
    "plugins",
    "api",
    "cli",
    "metrics.py",
    "links.py",
    "get_provider_info.py",
    "spark/connection.py",
    "spark/cluster/address.py",
    "spark/admission.py",
    "spark/policy.py",
    "spark/process/job_environment.py",
    "spark/process/submit.py",
    "spark/group.py",
}
#: What reads settings, connects or starts something, and so must stand inside a function.
EFFECTS = {"os.getenv", "create_engine", "Ledger", "Thread", "threading.Thread", "open", "print"}
EFFECTS_OF = ("os.environ", "conf.")


def name_of(module: Path) -> str:
    return module.relative_to(ROOT).as_posix()


def part_of(module: Path) -> str:
    return name_of(module).partition("/")[0]


def rule_of(module: Path, rules: Iterable[str]) -> str:
    """The narrowest rule for a module: a file's own, that of its folder, or that of its part."""
    name = name_of(module)
    return max((rule for rule in rules if name == rule or name.startswith(f"{rule}/")), key=len, default="")


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


def imports_of(module: Path) -> Iterator[str]:
    """Everything imported, at the top or inside functions."""
    yield from imports_among(module, ast.walk(tree_of(module)))


def imports_among(module: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(module)}: a relative import hides where it points"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level(module: Path) -> Iterator[ast.AST]:
    """Everything that runs on import: not the bodies of functions."""
    waiting: list[ast.AST] = list(tree_of(module).body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)]
        elif not isinstance(node, ast.Lambda) and not _is_for_a_checker_or_a_script(node):
            waiting += ast.iter_child_nodes(node)


def _is_for_a_checker_or_a_script(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and (
        "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test)
    )


def test_every_part_of_the_package_has_its_rule():
    assert {part_of(module) for module in MODULES} <= set(ALLOWED)


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_imports_point_one_way(module: Path):
    """A22"""
    part = part_of(module)
    allowed = {*ALLOWED[rule_of(module, ALLOWED)].split(), part.removesuffix(".py")}
    for imported in imports_of(module):
        package, _, rest = imported.partition(".")
        if package == PACKAGE:
            assert rest.split(".")[0] in allowed, f"{name_of(module)} imports {imported}"
        elif package == "airflow" and part != "testing":
            assert rule_of(module, MAY_IMPORT_AIRFLOW), f"{name_of(module)} imports {imported}"
        elif package == "pyspark":
            assert part == "spark", f"{name_of(module)} imports {imported}"


@pytest.mark.parametrize("module", sorted((ROOT / "testing").glob("*.py")), ids=name_of)
def test_the_test_kit_imports_airflow_only_when_a_task_runs(module: Path):
    """A21"""
    assert not [name for name in imports_among(module, top_level(module)) if name.partition(".")[0] == "airflow"]


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_importing_a_module_has_no_effect(module: Path):
    """A41: DAG files are parsed often, so no settings are read and nothing is opened or started."""
    for node in top_level(module):
        if isinstance(node, ast.Call | ast.Subscript):
            what = ast.unparse(node.func if isinstance(node, ast.Call) else node.value)
            wrong = what in EFFECTS or what.startswith(EFFECTS_OF)
            assert not wrong, f"{name_of(module)}:{node.lineno} runs {what} on import"


def in_fresh_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_core_works_where_airflow_is_not_installed():
    """A22"""
    core = [
        f"{PACKAGE}.{name_of(module).removesuffix('.py').replace('/', '.').removesuffix('.__init__')}"
        for module in MODULES
        if part_of(module) in ("domain", "brokers", "dispatcher", "spark", "testing")
        and "hooks" not in ALLOWED[rule_of(module, ALLOWED)].split()
        and not rule_of(module, MAY_IMPORT_AIRFLOW)
        and not name_of(module).startswith("brokers/ledger/migrations/")
    ]
    assert len(core) > 20
    code = f"""
import sys, threading, importlib, os
sys.modules["airflow"] = None
before = dict(os.environ), os.listdir()
for name in {core!r}:
    importlib.import_module(name)
assert threading.active_count() == 1, threading.enumerate()
assert before == (dict(os.environ), os.listdir())
"""
    in_fresh_python(code)


def test_the_pytest_plugin_imports_nothing_heavy():
    """A21: every pytest run of an environment with this package loads it."""
    code = f"import sys, {PACKAGE}.testing.fixtures; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in in_fresh_python(code).split()}
    assert not loaded & {"airflow", "sqlalchemy", "alembic", "pyspark", "pika", "confluent_kafka"}
