"""The page on Spark is true: its DAGs are DAGs, its commands are understood, its defaults are the defaults."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from airflow_delay_provider.cli.definition import get_delay_cli_commands
from airflow_delay_provider.get_provider_info import get_provider_info
from airflow_delay_provider.operators.spark import SparkSubmitRetryOperator
from airflow_delay_provider.spark.retries import HISTORY_KEY, SparkRetries

TEXT = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
TASKS = [
    {"count": "SparkSubmitRetryOperator"},
    {"count": "SparkSubmitOperator"},
    {
        "count.submit_1": "SparkAttemptOperator",
        "count.schedule_2": "ScheduleRetryOperator",
        "count.wait_2": "DelayedRetrySensor",
        "count.submit_2": "SparkAttemptOperator",
        "count.schedule_3": "ScheduleRetryOperator",
        "count.wait_3": "DelayedRetrySensor",
        "count.submit_3": "SparkAttemptOperator",
        "count.outcome": "SparkOutcomeOperator",
        "publish": "EmptyOperator",
    },
]


# The Spark provider still imports what Airflow has deprecated.
@pytest.mark.filterwarnings("ignore::airflow.utils.deprecation_tools.DeprecatedImportWarning")
@pytest.mark.parametrize(("snippet", "tasks"), list(zip(SNIPPETS, TASKS, strict=True)))
def test_the_dags_of_the_page_are_dags(snippet: str, tasks: dict[str, str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(snippet, "docs/spark.md", "exec"), names)
    dag: DAG = names["dag"]
    assert {task_id: task.task_type for task_id, task in dag.task_dict.items()} == tasks
    stored = DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(dag))))
    assert set(stored.task_dict) == set(tasks)


def commands() -> Iterator[list[str]]:
    """The arguments of each ``airflow delay`` command of the page."""
    for block in re.findall(r"```shell\n(.*?)```", TEXT, flags=re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["airflow", "delay"]:
                yield words[2:]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_the_commands_of_the_page_are_understood(words: list[str]) -> None:
    [group] = get_delay_cli_commands()
    known: Any = {each.name: each for each in group.subcommands}[words[0]]
    parser = ArgumentParser(exit_on_error=False)
    for argument in getattr(known, "args", ()):
        argument.add_to_parser(parser)
    if not hasattr(known, "subcommands"):
        parser.parse_args(words[1:])


def row_of(name: str) -> str:
    [row] = [line for line in TEXT.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1]]
    return row.split("|")[2].strip().strip("`")


def test_the_defaults_of_the_page_are_the_defaults() -> None:
    defaults = SparkRetries()
    for name in ("max_attempts", "max_resource_failures", "max_infrastructure_failures"):
        assert row_of(name) == str(getattr(defaults, name))
    assert row_of("unknown_as") == defaults.unknown_as.value
    assert row_of("max_elapsed") == f"{defaults.max_elapsed.total_seconds() / 3600:.0f} h"
    arguments = inspect.signature(SparkSubmitRetryOperator.__init__).parameters
    for name in ("ticket_channel", "dead_letter_channel"):
        assert row_of(name) == arguments[name].default
    options = get_provider_info()["config"]["delay"]["options"]
    for name in ("spark_submissions_per_second", "spark_submission_burst"):
        assert row_of(name) == options[name]["default"]
    assert f"`{HISTORY_KEY}`" in TEXT


def test_every_argument_of_the_operator_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", TEXT))
    own = {
        name
        for name, kind in inspect.signature(SparkSubmitRetryOperator.__init__).parameters.items()
        if kind.kind is kind.KEYWORD_ONLY
    }
    assert own <= explained
