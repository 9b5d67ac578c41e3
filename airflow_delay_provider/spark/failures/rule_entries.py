"""Rules as people write them: every field checked, every mistake named with its remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.spark.failures.rule import Rule, Where
from airflow_delay_provider.spark.failures.verdict import Verdict

Word = TypeVar("Word", bound=StrEnum)

_SIGNS = ("text", "exception", "condition", "sqlstate", "exit_code", "driver_state", "pod_reason")
_FIELDS = ("name", "verdict", "reason", "where", *_SIGNS)
#: A repeat of something that repeats: its time can explode on a line that almost matches.
_NESTED_REPEAT = re.compile(r"\((?:\\.|\[[^\]]*\]|[^()\\])*(?<!\\)[+*](?:\\.|[^()\\])*\)(?:[+*]|\{\d+,\})")


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
    """Return one pattern that finds any of these."""
    return re.compile("|".join(f"(?:{one})" for one in patterns))


class _Entry:
    """One rule as it is written."""

    def __init__(self, label: str, raw: Mapping[str, Any]) -> None:
        self._label = label
        self._raw = raw

    @classmethod
    def read(cls, raw: object, number: int) -> Rule:
        if not isinstance(raw, Mapping):
            raise ConfigurationError(f"rule {number}: {raw!r} is no rule; write a mapping of fields to values")
        return cls(f"rule {raw.get('name', number)!r}", raw)._rule()

    def _rule(self) -> Rule:
        for field in self._raw:
            if field not in _FIELDS:
                raise self._wrong(field, "is no field of a rule", f"use {', '.join(_FIELDS)}")
        if not any(self._raw.get(sign) for sign in _SIGNS):
            raise self._wrong("text", "is missing, as is every other sign", f"give one of {', '.join(_SIGNS)}")
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
            raise self._wrong("text", f"{pattern!r} is no regular expression ({error})", "correct it") from error
        if _NESTED_REPEAT.search(pattern):
            raise self._wrong("text", f"{pattern!r} repeats a repeat", "write it without + or * around + or *")
        return pattern
