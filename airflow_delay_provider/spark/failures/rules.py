"""Rules: which criteria of a failure lead to which verdict. The built-in rules stand in rules.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]  # PyYAML brings no annotations

from airflow_delay_provider.domain.exceptions import ConfigurationError

_SQLSTATE = re.compile(r"SQLSTATE: ?([0-9A-Z]{5})")
_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_]{2,100}(?:\.[A-Z0-9_]{1,100})?)\]")
_CRITERIA = ("text", "exception", "condition", "sqlstate", "exit_code", "driver_state", "pod_reason")
_FIELDS = ("name", "verdict", "reason", "where", *_CRITERIA)
#: Nested repeats can take exponential time on a line that almost matches.
_NESTED_REPEAT = re.compile(r"\((?:\\.|\[[^\]]*\]|[^()\\])*(?<!\\)[+*](?:\\.|[^()\\])*\)(?:[+*]|\{\d+,\})")

Word = TypeVar("Word", bound=StrEnum)


class Verdict(StrEnum):
    """Whether a retry can help."""

    #: An outside problem that may pass: a refused connection, a lock, a timeout, throttling.
    TRANSIENT = "transient"
    #: The cluster failed, not the application.
    INFRASTRUCTURE = "infrastructure"
    #: Too little memory, disk or quota; a retry rarely helps.
    RESOURCE = "resource"
    #: It will fail again: code, query, arguments, missing files, permissions.
    PERMANENT = "permanent"
    #: No rule matches; ``unknown_as`` or ``on_unknown`` decides.
    UNKNOWN = "unknown"


class Where(StrEnum):
    """Where a rule looks; the rules are tried in this order."""

    #: Every known line, before all else: for messages that only this application prints.
    ANYWHERE = "anywhere"
    #: The whole failure that ended the application: a lost executor counts whatever its cause.
    FAILURE = "failure"
    #: Its exceptions one by one, the root cause first.
    CAUSE = "cause"
    #: The same again, if nothing else matched.
    LAST = "last"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule: one matching criterion is enough."""

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
    #: It sees statements without quoted values and paths, since it knows nothing of the application's data.
    general: bool = False

    def matches(self, statement: str) -> bool:
        """Tell whether a statement of the log meets a criterion of this rule."""
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
    """Layers of rules; all rules of a layer are tried before the next layer."""

    layers: tuple[tuple[Rule, ...], ...]
    #: Statements that name no reason: the next statement of the same failure decides.
    uninformative_statements: re.Pattern[str]
    #: Statements that mark the whole failure as the consequence of an earlier one.
    follow_up_failures: re.Pattern[str]
    #: Statements of a lost executor, which a resource that ran out before explains.
    executor_losses: re.Pattern[str]

    @classmethod
    def builtin(cls) -> Rules:
        """Return the built-in rules."""
        return _builtin()

    def extended_by(self, extra: Iterable[Mapping[str, Any]]) -> Rules:
        """Return rules that try ``extra``, written as in rules.yaml, before these."""
        layer = read_rules(extra)
        return replace(self, layers=(layer, *self.layers)) if layer else self


@cache
def _builtin() -> Rules:
    # Read on first use: importing has no effect.
    data = yaml.safe_load(files(__package__).joinpath("rules.yaml").read_text(encoding="utf-8"))
    return Rules(
        layers=(tuple(replace(rule, general=True) for rule in read_rules(data["rules"])),),
        uninformative_statements=read_patterns(data["uninformative_statements"]),
        follow_up_failures=read_patterns(data["follow_up_failures"]),
        executor_losses=read_patterns(data["executor_losses"]),
    )


# -- rules as people write them ------------------------------------------------------------------------------------


def read_rules(entries: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Return the rules in the order in which they are written."""
    if isinstance(entries, (str, Mapping)) or not isinstance(entries, Iterable):
        raise ConfigurationError("rules: not a list of rules; write a list with one mapping per rule")
    rules = tuple(_Entry.read(one, number) for number, one in enumerate(entries, start=1))
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"rule {name!r}: name is taken by another rule; give each rule its own")
    return rules


def read_patterns(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return one pattern that matches if any of these does."""
    return re.compile("|".join(f"(?:{one})" for one in patterns))


class _Entry:
    """One rule as it is written; every mistake is reported with its remedy."""

    def __init__(self, label: str, raw: Mapping[str, Any]) -> None:
        self._label = label
        self._raw = raw

    @classmethod
    def read(cls, raw: object, number: int) -> Rule:
        if not isinstance(raw, Mapping):
            raise ConfigurationError(f"rule {number}: {raw!r} is not a rule; write a mapping of fields to values")
        return cls(f"rule {raw.get('name', number)!r}", raw)._rule()

    def _rule(self) -> Rule:
        for field in self._raw:
            if field not in _FIELDS:
                raise self._wrong(field, "is not a field of a rule", f"use {', '.join(_FIELDS)}")
        if not any(self._raw.get(name) for name in _CRITERIA):
            raise self._wrong(
                "text", "is missing, and so is every other criterion", f"give one of {', '.join(_CRITERIA)}"
            )
        return Rule(
            name=self._line("name"),
            verdict=self._choice("verdict", Verdict),
            reason=self._line("reason"),
            where=self._choice("where", Where) if "where" in self._raw else Where.CAUSE,
            text=self._pattern(),
            conditions=frozenset(self._words("condition")),
            sqlstates=tuple(self._words("sqlstate")),
            exit_codes=frozenset(self._numbers("exit_code")),
            driver_states=frozenset(self._words("driver_state")),
            pod_reasons=frozenset(self._words("pod_reason")),
        )

    def _wrong(self, field: object, problem: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"{self._label}: {field} {problem}; {remedy}")

    def _line(self, field: str) -> str:
        value = self._raw.get(field)
        if not isinstance(value, str) or not value.strip() or len(value.splitlines()) > 1:
            raise self._wrong(field, f"is {value!r}", "give one line of text")
        return value.strip()

    def _choice(self, field: str, kind: type[Word]) -> Word:
        value = self._raw.get(field)
        try:
            return kind(str(value))
        except ValueError as error:
            raise self._wrong(field, f"is {value!r}", f"use {', '.join(kind)}") from error

    def _words(self, field: str) -> list[str]:
        value = self._raw.get(field, [])
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, (list, tuple)) or not all(isinstance(one, str) and one for one in words):
            raise self._wrong(field, f"is {value!r}", "give a text or a list of texts (quote numbers)")
        return list(words)

    def _numbers(self, field: str) -> list[int]:
        value = self._raw.get(field, [])
        numbers = [value] if isinstance(value, int) else value
        if not isinstance(numbers, (list, tuple)) or not all(type(one) is int for one in numbers):
            raise self._wrong(field, f"is {value!r}", "give a whole number or a list of them")
        return list(numbers)

    def _pattern(self) -> re.Pattern[str] | None:
        parts = [self._checked(one) for one in self._words("text")]
        names = self._words("exception")
        if names:
            parts.append(rf"(?<![A-Za-z0-9_])(?:Spark)?(?:{'|'.join(map(re.escape, names))})(?=[:;\s(,]|$)")
        return re.compile("|".join(f"(?:{part})" for part in parts)) if parts else None

    def _checked(self, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise self._wrong("text", f"{pattern!r} is not a regular expression ({error})", "correct it") from error
        if _NESTED_REPEAT.search(pattern):
            raise self._wrong("text", f"{pattern!r} has nested repeats", "write it without + or * around + or *")
        return pattern
