"""The names that DAG authors import stay, and importing the package alone costs nothing."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import airflow_delay_provider

PUBLIC = [
    "Backoff",
    "CancelMessageOperator",
    "DeferMessage",
    "DelayError",
    "DelayHook",
    "Hold",
    "KafkaHook",
    "Message",
    "MessageDispatchedSensor",
    "MessageSensor",
    "OnConflict",
    "OnPast",
    "RabbitMQHook",
    "ReplayMessageOperator",
    "RescheduleMessageOperator",
    "ScheduleMessageOperator",
    "SparkRetries",
    "SparkRetryPolicy",
    "SparkSubmitRetryOperator",
    "compose_message",
    "decode_payload",
    "spark_submit_with_retries",
]


def test_the_public_names_are_these() -> None:
    """Removing or renaming one breaks DAGs: it needs a new major version and a line in the changelog."""
    assert sorted(airflow_delay_provider.__all__) == PUBLIC
    assert set(PUBLIC) < set(dir(airflow_delay_provider))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    value = getattr(airflow_delay_provider, name)
    assert value.__name__ == name
    # Its own: dataclasses and subclasses get an uninformative one.
    doc = vars(value)["__doc__"] if inspect.isclass(value) else value.__doc__
    assert doc
    assert not doc.startswith(f"{name}(")


def test_type_checkers_see_the_same_names_in_the_same_modules() -> None:
    parsed = ast.parse(Path(airflow_delay_provider.__file__).read_text())
    imported = {
        alias.asname: node.module
        for node in ast.walk(parsed)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert imported == airflow_delay_provider._MODULE_OF


def test_an_unknown_name_is_refused_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'ScheduleOperator'"):
        _ = airflow_delay_provider.ScheduleOperator
    with pytest.raises(ImportError, match="cannot import name 'ScheduleOperator'"):
        exec("from airflow_delay_provider import ScheduleOperator")


def test_the_package_alone_imports_only_the_standard_library() -> None:
    program = """
import sys
before = set(sys.modules)
import airflow_delay_provider
print(*(set(sys.modules) - before))
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    ours = {name for name in printed.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert ours == {"airflow_delay_provider"}
