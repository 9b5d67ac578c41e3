"""What Airflow reads at each call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from airflow_delay_provider.dispatcher.options import DispatcherConfig
from tests.unit.cli.commandline import CommandLine, parser


def actions() -> Iterator[tuple[str, object]]:
    from airflow.cli.cli_config import ActionCommand, GroupCommand

    from airflow_delay_provider.cli.definition import get_delay_cli_commands

    def walk(prefix: str, commands: object) -> Iterator[tuple[str, object]]:
        for command in commands:  # type: ignore[attr-defined]
            name = f"{prefix} {command.name}".strip()
            if isinstance(command, GroupCommand):
                yield from walk(name, command.subcommands)
            elif isinstance(command, ActionCommand):
                yield name, command

    yield from walk("", get_delay_cli_commands())


def test_every_command_leads_to_a_function() -> None:
    from airflow.sdk.module_loading import import_string

    found = {}
    for name, command in actions():
        (path,) = [cell.cell_contents for cell in command.func.__closure__ if isinstance(cell.cell_contents, str)]  # type: ignore[attr-defined]
        assert callable(import_string(path))
        found[name] = path
    assert sorted(found) == [
        "delay cancel",
        "delay consume",
        "delay db check",
        "delay db downgrade",
        "delay db migrate",
        "delay dispatcher",
        "delay expedite",
        "delay list",
        "delay replay",
        "delay reschedule",
        "delay retries",
        "delay schedule",
        "delay send",
        "delay show",
        "delay status",
        "delay topology create",
        "delay topology delete",
        "delay topology replay-parked",
        "delay topology verify",
    ]


@pytest.mark.parametrize(
    "name", ["schedule", "consume", "list", "retries", "topology verify", "db downgrade", "dispatcher"]
)
def test_help_names_the_exit_codes(delay: CommandLine, name: str) -> None:
    result = delay(*name.split(), "--help")
    assert result.code == 0
    assert "Exit codes: 0 success, 1 refused" in " ".join(result.out.split())


def test_no_help_text_looks_like_markup_which_airflow_would_swallow(delay: CommandLine) -> None:
    """Airflow prints help with rich, where ``[delay]`` is a style."""
    for name, command in actions():
        texts = [command.help, command.description or "", *(arg.kwargs.get("help", "") for arg in command.args)]  # type: ignore[attr-defined]
        assert not [text for text in texts if "[" in text], name
    assert "section delay of airflow.cfg" in " ".join(delay("dispatcher", "--help").out.split())


def test_the_definition_loads_nothing_but_itself() -> None:
    """It is imported at each `airflow` call, so it must cost next to nothing."""
    code = (
        "import sys, airflow.cli.cli_config; before = set(sys.modules);"
        "import airflow_delay_provider.cli.definition as d; d.get_delay_cli_commands();"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = ("airflow_delay_provider.brokers.ledger", "airflow_delay_provider.brokers", "rich", "alembic", "sqlalchemy")
    assert [name for name in run.stdout.split() if name.startswith(heavy)] == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--health-port", "high"], "health-port: 'high' is not a port; use 1"),
        (["--health-port", "70000"], "health-port: '70000' is not a port; use 1"),
        (["--batch", "0"], "batch: '0' is not a whole number of at least 1; use"),
        (["--poll-interval", "x"], "poll-interval: 'x' is not a number above 0; use"),
        (["--poll-interval", "0"], "poll-interval: '0' is not a number above 0; use"),
        (["--rate-limit", "-1"], "rate-limit: '-1' is not a number of at least 0; use"),
        (["--rate-limit", "inf"], "rate-limit: 'inf' is not a number of at least 0; use"),
        (["--retention-days", "0"], "retention-days: '0' is not a number above 0; use"),
        (["--health-port", "-2"], "health-port: '-2' is not a port; use 1"),
    ],
)
def test_the_dispatcher_refuses_bad_options(delay: CommandLine, words: list[str], problem: str) -> None:
    result = delay("dispatcher", *words)
    assert result.code == 2
    assert result.err.startswith(problem)


def test_the_dispatcher_takes_its_settings_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """B24, B26: an option goes before ``[delay]``, which goes before the default."""
    monkeypatch.setenv("AIRFLOW__DELAY__DISPATCHER_BATCH", "7")
    monkeypatch.setenv("AIRFLOW__DELAY__DISPATCHER_RATE_LIMIT", "50")
    config = cli_config("--rate-limit", "0", "--health-port", "-1", "--retention-days", "2")
    assert (config.batch, config.rate_limit, config.health_port) == (7, None, None)
    assert (config.poll_interval.total_seconds(), config.retention.days) == (0.02, 2)


def bare_config(*words: str) -> DispatcherConfig:
    from airflow_delay_provider.dispatcher.__main__ import _parser
    from airflow_delay_provider.dispatcher.options import read_config

    return read_config(vars(_parser().parse_args(words)))


def cli_config(*words: str) -> DispatcherConfig:
    from airflow_delay_provider.cli.dispatcher import _config_of

    return _config_of(parser().parse_args(["delay", "dispatcher", *words]))


@pytest.mark.parametrize("config_of", [cli_config, bare_config])
@pytest.mark.parametrize("name", ["index", "kafka"])
def test_the_dispatcher_serves_the_connections_that_are_named(
    config_of: Callable[..., DispatcherConfig], name: str
) -> None:
    assert getattr(config_of(), name) == ()
    assert getattr(config_of(f"--{name}", "one", f"--{name}", "two"), name) == ("one", "two")


@pytest.mark.parametrize("name", ["index", "kafka"])
def test_connections_can_be_configured(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"AIRFLOW__DELAY__{name.upper()}_CONNECTIONS", "rabbit, ,kafka")
    assert getattr(cli_config(), name) == ("rabbit", "kafka")
    assert getattr(cli_config(f"--{name}", "one"), name) == ("one",)


@pytest.mark.parametrize("config_of", [cli_config, bare_config])
def test_the_dispatcher_can_have_its_own_name(config_of: Callable[..., DispatcherConfig]) -> None:
    assert (config_of().instance, config_of("--instance", "").instance) == (None, None)
    assert config_of("--instance", "dispatcher-1").instance == "dispatcher-1"


def test_the_name_can_be_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__DISPATCHER_INSTANCE", "dispatcher-2")
    assert cli_config().instance == "dispatcher-2"
    assert cli_config("--instance", "dispatcher-1").instance == "dispatcher-1"


def test_a_wrong_setting_is_named_with_its_section(delay: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__DELAY__DISPATCHER_BATCH", "many")
    result = delay("dispatcher")
    assert result.code == 2
    assert result.err.startswith("[delay] dispatcher_batch: 'many' is not a whole number of at least 1; use")
