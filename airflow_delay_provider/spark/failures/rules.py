"""Layers of rules. They are data; the built-in ones stand in rules.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml  # type: ignore[import-untyped]  # PyYAML brings no annotations

from airflow_delay_provider.spark.failures.rule import Rule
from airflow_delay_provider.spark.failures.rule_entries import read_patterns, read_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Layers of rules; an earlier layer is asked first about everything."""

    layers: tuple[tuple[Rule, ...], ...]
    #: Statements that say nothing about the reason: the next one of the same failure is asked.
    hollow_statements: re.Pattern[str]
    #: Statements that show the whole failure to be an echo of an earlier one.
    echoes: re.Pattern[str]
    #: Statements of a loss that is explained by what ran out before it.
    losses: re.Pattern[str]

    @classmethod
    def builtin(cls) -> Rules:
        """Return the rules of this package."""
        return _builtin()

    def extended_by(self, extra: Iterable[Mapping[str, Any]]) -> Rules:
        """Return rules that ask ``extra``, written as in rules.yaml, before these."""
        layer = read_rules(extra)
        return replace(self, layers=(layer, *self.layers)) if layer else self


@cache
def _builtin() -> Rules:
    # Read on first use: importing has no effect.
    data = yaml.safe_load(files(__package__).joinpath("rules.yaml").read_text(encoding="utf-8"))
    return Rules(
        layers=(tuple(replace(rule, general=True) for rule in read_rules(data["rules"])),),
        hollow_statements=read_patterns(data["hollow_statements"]),
        echoes=read_patterns(data["echoes"]),
        losses=read_patterns(data["losses"]),
    )
