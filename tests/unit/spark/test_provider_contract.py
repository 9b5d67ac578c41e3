"""The private names of the Spark provider that this package uses; each new version must still have them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.apache.spark.hooks import spark_submit as provider_hook
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators import spark_submit as provider_operator
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

from airflow_delay_provider.operators import spark as our_operator
from airflow_delay_provider.spark import group as our_group
from airflow_delay_provider.spark.failures import classifier
from airflow_delay_provider.spark.process import submit as our_hook

#: Methods of the hook that GuardedSparkSubmitHook overrides or calls, with their parameters.
HOOK_METHODS = {
    "_build_spark_submit_command": ["self", "application"],
    "_process_spark_submit_log": ["self", "itr"],
    "_process_spark_status_log": ["self", "itr"],
    "_start_driver_status_tracking": ["self"],
}
#: Attributes of the hook that it reads or replaces.
HOOK_ATTRIBUTES = {
    "_conf",
    "_conn_id",
    "_connection",
    "_driver_id",
    "_driver_status",
    "_env",
    "_should_track_driver_status",
    "_submit_sp",
}
#: Names of the operator that our operators override or read.
OPERATOR_METHODS = {"_get_hook": ["self"]}
OPERATOR_ATTRIBUTES = {"_conn_id", "_deploy_mode", "_hook"}
#: Public, but no documented part of the operator's interface.
OPERATOR_PUBLIC = {"durable", "external_id_key"}
#: Texts that the provider raises and that we parse: the evidence of a failure, and a job that is unknown.
MESSAGES = {
    "Last spark-submit output:": provider_hook,
    "Cannot execute: ": provider_hook,
    "Error code is: ": provider_hook,
    "Kubernetes spark exit code is: ": provider_hook,
    "exited with status ": provider_operator,
    "Diagnostics: ": provider_hook,
    "YARN RM REST API returned HTTP ": provider_hook,
    "(phase=Failed": provider_hook,
    "Spark REST API returned failure for ": provider_operator,
}
ADVICE = "change the code that uses it, or lower the ceiling of the provider in pyproject.toml"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> SparkSubmitHook:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[1]"}')
    return SparkSubmitHook()


@pytest.fixture
def operator() -> SparkSubmitOperator:
    return SparkSubmitOperator(task_id="load", application="job.py")


@pytest.mark.parametrize(("name", "parameters"), HOOK_METHODS.items())
def test_the_hook_has_the_methods_that_we_override(name: str, parameters: list[str]) -> None:
    require_method(SparkSubmitHook, name, parameters)


@pytest.mark.parametrize(("name", "parameters"), OPERATOR_METHODS.items())
def test_the_operator_has_the_methods_that_we_override(name: str, parameters: list[str]) -> None:
    require_method(SparkSubmitOperator, name, parameters)


@pytest.mark.parametrize("name", sorted(HOOK_ATTRIBUTES))
def test_the_hook_has_the_attributes_that_we_use(hook: SparkSubmitHook, name: str) -> None:
    assert name in vars(hook), f"SparkSubmitHook no longer sets {name}: {ADVICE}"


@pytest.mark.parametrize("name", sorted(OPERATOR_ATTRIBUTES | OPERATOR_PUBLIC))
def test_the_operator_has_the_attributes_that_we_use(operator: SparkSubmitOperator, name: str) -> None:
    assert hasattr(operator, name), f"SparkSubmitOperator no longer has {name}: {ADVICE}"


def test_the_hook_passes_our_arguments_to_popen() -> None:
    """``submit`` takes ``stdin`` and ``start_new_session`` for the process of spark-submit."""
    kinds = [each.kind for each in inspect.signature(SparkSubmitHook.submit).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds, f"SparkSubmitHook.submit no longer takes **kwargs: {ADVICE}"


@pytest.mark.parametrize(("text", "module"), MESSAGES.items())
def test_the_provider_still_says_what_we_parse(text: str, module: Any) -> None:
    assert text in inspect.getsource(module), f"{module.__name__} no longer says {text!r}: {ADVICE}"


def test_the_list_of_private_names_is_complete(hook: SparkSubmitHook, operator: SparkSubmitOperator) -> None:
    """A private name that we use must be on the list above, and so must one that we define and the provider has too."""
    hook_names = {*dir(SparkSubmitHook), *vars(hook)}
    operator_names = {*dir(SparkSubmitOperator), *vars(operator)} - {*dir(object)}
    assert private_names(our_hook) & hook_names == {*HOOK_METHODS} | HOOK_ATTRIBUTES
    used = private_names(our_operator) | private_names(our_group)
    assert used & operator_names == {*OPERATOR_METHODS} | OPERATOR_ATTRIBUTES


def test_every_message_on_the_list_is_parsed() -> None:
    """The patterns escape some characters, so they are compared without them."""
    patterns = "".join(inspect.getsource(module) for module in (classifier, our_hook)).replace("\\", "")
    for text in MESSAGES:
        assert text.removesuffix("HTTP ") in patterns, f"no pattern looks for {text!r}: remove it from the list"


def require_method(owner: type, name: str, parameters: list[str]) -> None:
    method = getattr(owner, name, None)
    assert method is not None, f"{owner.__name__} no longer has {name}: {ADVICE}"
    found = list(inspect.signature(method).parameters)
    assert found == parameters, f"{owner.__name__}.{name} now takes {found}: {ADVICE}"


def private_names(module: Any) -> set[str]:
    """All attributes with one leading underscore that a module reads, writes or defines in its classes."""
    nodes = list(ast.walk(ast.parse(Path(module.__file__).read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}
