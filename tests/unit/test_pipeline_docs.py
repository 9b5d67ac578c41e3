"""The page on the data pipeline is true: its commands are understood, its DAG is a DAG, its tables are complete."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.spark import jobs
from airflow_delay_provider.spark.datasource import options, read_options
from airflow_delay_provider.spark.datasource.schema import COLUMNS
from airflow_delay_provider.spark.jobs.bulk.arguments import build_parser, parse_arguments
from airflow_delay_provider.spark.jobs.command import ExitCode

TEXT = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()


def commands(program: str) -> Iterator[list[str]]:
    """The arguments of each command of the page that runs this job."""
    for block in re.findall(r"```shell\n(.*?)```", TEXT, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if program in words:
                yield words[words.index(program) + 1 :]


def test_the_commands_of_the_bulk_job_are_accepted() -> None:
    shown = list(commands("bulk_schedule.py"))
    assert len(shown) == 4
    for words in shown:
        parse_arguments(words)


def test_the_commands_of_the_lateness_job_are_accepted() -> None:
    from airflow_delay_provider.spark.jobs.lateness import _parse

    [words] = commands("lateness.py")
    assert _parse(words).connections == ("delay_default", "delay_kafka_default")


def test_every_option_of_the_page_exists_and_the_dag_is_a_dag() -> None:
    options_shown = set(re.findall(r"`(--[a-z-]+)", TEXT))
    known = set(build_parser()._option_string_actions)
    elsewhere = {
        "--bulk",
        "--kafka",
        "--packages",
        "--jars",
        "--conf",
        "--max-records",
        "--release",
        "--fail-on-slo",
        "--full",
        "--accept-gap",
        "--copied",
        "--index",
    }
    assert options_shown - known - elsewhere == set()

    [snippet] = [each for each in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL) if "DAG(" in each]
    names: dict[str, Any] = {}
    exec(compile(snippet, "docs/pipeline.md", "exec"), names)
    [task] = names["dag"].tasks
    parse_arguments([str(word) for word in task.application_args])


def test_the_options_of_the_data_source_are_complete() -> None:
    table = TEXT.partition("| option | default |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE) == list(options._WRITE_OPTIONS)
    table = TEXT.partition("## Read messages and journals")[2].partition("\n\nWith")[0]
    first_cells = re.findall(r"^\| (`.*?`) \|", table, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(first_cells))) == set(read_options._KNOWN)


def test_the_columns_and_exit_codes_are_complete() -> None:
    table = TEXT.partition("### Columns")[2].partition("\n`--column")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(COLUMNS)
    codes = TEXT.partition("| exit code |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (\d+)", codes, flags=re.MULTILINE) == [
        str(int(code)) for code in ExitCode if code is not ExitCode.INTERRUPTED
    ]


@pytest.mark.parametrize("path", [jobs.BULK_SCHEDULE, jobs.LATENESS])
def test_the_files_of_the_jobs_are_there(path: str) -> None:
    assert Path(path).exists()
