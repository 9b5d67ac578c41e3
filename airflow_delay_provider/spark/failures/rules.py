"""Rules: which signs of a failure mean what. They are data; the built-in ones stand in rules.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

import yaml  # type: ignore[import-untyped]  # PyYAML brings no annotations

from airflow_delay_provider.spark.failures.verdict import Verdict

_SQLSTATE = re.compile(r"SQLSTATE: ?([0-9A-Z]{5})")
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]{2,100}(?:\.[A-Z0-9_]{1,100})?)\]")


class Where(StrEnum):
    """Where a rule looks, and when: in this order."""

    #: Every line that is known, before all else: for signs that only this application prints.
    ANYWHERE = "anywhere"
    #: The failure that ended the application, all of it: a lost executor counts whatever its cause.
    FAILURE = "failure"
    #: Its exceptions one by one, the root of the causes first.
    CAUSE = "cause"
    #: The same once more, after nothing else was found.
    LAST = "last"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule: any of its signs is enough."""

    name: str
    verdict: Verdict
    #: Half a sentence for people.
    reason: str
    where: Where = Where.CAUSE
    text: re.Pattern[str] | None = None
    conditions: frozenset[str] = frozenset()
    #: Whole states or their beginnings.
    sqlstates: tuple[str, ...] = ()
    exit_codes: frozenset[int] = frozenset()
    driver_states: frozenset[str] = frozenset()
    pod_reasons: frozenset[str] = frozenset()

    def matches(self, statement: str) -> bool:
        """Tell whether a statement of the log shows a sign of this rule."""
        if self.text is not None and self.text.search(statement):
            return True
        if self.sqlstates and any(state.startswith(self.sqlstates) for state in _SQLSTATE.findall(statement)):
            return True
        return bool(self.conditions) and any(
            name in self.conditions or name.partition(".")[0] in self.conditions
            for name in _CONDITION.findall(statement)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Layers of rules; an earlier layer is asked first about everything."""

    layers: tuple[tuple[Rule, ...], ...]
    #: Statements that say nothing about the reason: the next one of the same failure is asked.
    hollow_statements: re.Pattern[str]
    #: Statements that show the whole failure to be an echo of an earlier one.
    echoes: re.Pattern[str]

    @classmethod
    def builtin(cls) -> Rules:
        """Return the rules of this package."""
        return _builtin()

    def extended_by(self, extra: Iterable[Mapping[str, Any]]) -> Rules:
        """Return rules that ask ``extra``, written as in rules.yaml, before these."""
        from airflow_delay_provider.spark.failures.rule_entries import read_rules

        layer = read_rules(extra)
        if not layer:
            return self
        return Rules(layers=(layer, *self.layers), hollow_statements=self.hollow_statements, echoes=self.echoes)


@cache
def _builtin() -> Rules:
    # Read on first use: importing has no effect.
    from airflow_delay_provider.spark.failures.rule_entries import read_patterns, read_rules

    data = yaml.safe_load(files(__package__).joinpath("rules.yaml").read_text(encoding="utf-8"))
    return Rules(
        layers=(read_rules(data["rules"]),),
        hollow_statements=read_patterns(data["hollow_statements"]),
        echoes=read_patterns(data["echoes"]),
    )
