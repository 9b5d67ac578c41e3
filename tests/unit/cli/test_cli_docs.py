"""docs/cli.md agrees with the commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.unit.cli.commandline import CommandLine
from tests.unit.cli.test_cli_definition import actions

TEXT = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
#: Commands shown with an error that needs no server.
ERRORS = [
    "schedule orders --payload x --at 2030-01-31T17:00:00",
    "schedule --payload x",
    "retries --dag-id sales --give-up",
    "topology delete --conn-id rabbitmq_default",
]


def test_the_table_has_every_command_with_its_help() -> None:
    shown = dict(re.findall(r"^\| `([a-z -]+)` \| ([A-Z].*) \|$", TEXT, flags=re.MULTILINE))
    assert shown == {name.removeprefix("delay "): command.help for name, command in actions()}  # type: ignore[attr-defined]


def test_every_option_on_the_page_exists() -> None:
    known = {flag for _, command in actions() for arg in command.args for flag in arg.flags}  # type: ignore[attr-defined]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - known - {"--help"} == set()


@pytest.mark.parametrize("words", ERRORS)
def test_errors_are_shown_as_they_are(delay: CommandLine, words: str) -> None:
    [shown] = re.findall(rf"^\$ airflow delay {re.escape(words)}\n(.*)\n", TEXT, flags=re.MULTILINE)
    result = delay(*shlex.split(words))
    assert (result.code, result.out, result.err) == (2, "", f"{shown}\n")


def test_the_page_has_every_option_of_the_dispatcher_with_its_setting() -> None:
    from airflow_delay_provider.dispatcher.options import OPTIONS

    shown = re.findall(r"^\| `(--[a-z-]+)` \| `(\w+)` \|", TEXT, flags=re.MULTILINE)
    assert shown == [(option.flag, option.setting) for option in OPTIONS]
