"""Runs `airflow delay ...` as Airflow does, without the seconds that starting Airflow takes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


@cache
def parser() -> argparse.ArgumentParser:
    """The parser of `airflow`, with our group only."""
    from airflow.cli.cli_config import DefaultHelpParser
    from airflow.cli.cli_parser import _add_command

    from airflow_delay_provider.cli.definition import get_delay_cli_commands

    top = DefaultHelpParser(prog="airflow")
    subparsers = top.add_subparsers(dest="subcommand")
    for command in get_delay_cli_commands():
        _add_command(subparsers, command)
    return top


class CommandLine:
    """Call it with the arguments after `airflow delay`."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: str) -> Result:
        self._capture.readouterr()
        parser()
        for handler in logging.getLogger().handlers:
            # As Airflow's main does for commands with --output; the stream of an earlier test is closed.
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr
        try:
            args = parser().parse_args(["delay", *words])
            args.func(args)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = self._capture.readouterr()
        return Result(code, out, err)

    def document(self, *words: str) -> Any:
        """Run a command that must succeed and return its JSON document."""
        result = self(*words, "--output", "json")
        assert result.code == 0, result.err
        return result.document

    def counts(self) -> dict[str, int]:
        """All messages of the ledger by state."""
        counts: dict[str, int] = self.document("status")["counts"]
        return counts
