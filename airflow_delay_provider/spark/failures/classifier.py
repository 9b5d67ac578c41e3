"""From evidence to a verdict.

What ended the application decides, not what it survived: the last traceback or uncaught exception first, in it the
root of the causes before what wraps it. Only where that says nothing, earlier failures are asked, latest first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from airflow_delay_provider.spark.failures.anatomy import Failure, failures, last_failure_first
from airflow_delay_provider.spark.failures.evidence import Evidence
from airflow_delay_provider.spark.failures.rule import Rule, Where
from airflow_delay_provider.spark.failures.rules import Rules
from airflow_delay_provider.spark.failures.signs import names_exception
from airflow_delay_provider.spark.failures.text import cut, shown, unfolded, without_data, without_names
from airflow_delay_provider.spark.failures.verdict import Finding, Verdict

_EXIT_CODE = re.compile(
    r"(?:Error code is: |Kubernetes spark exit code is: |exit_code=|User application exited with (?:status )?)"
    r"(-?\d{1,3})\b"
)


#: How many failures of one log are asked for a reason.
_ASKED = 20
_LOST = re.compile(r"Lost (?:task|executor) ")
#: How many statements of losses are asked what ran out.
_REMEMBERED = 200


@dataclass(frozen=True, slots=True)
class _Match:
    rule: Rule
    line: str


def classify(evidence: Evidence, rules: Rules | None = None) -> Finding:
    """Return what the failure was; without ``rules`` the built-in ones decide."""
    rules = rules or Rules.builtin()
    case = _Case(evidence, rules)
    for layer in rules.layers:
        match = case.judged_by(layer)
        if match is not None:
            return _finding(match)
    return _undecided(case.last_words())


class _Case:
    """The evidence, read once."""

    def __init__(self, evidence: Evidence, rules: Rules) -> None:
        self._evidence = evidence
        self._rules = rules
        self._exit_code = _exit_code(evidence)
        self._texts = [
            evidence.driver_output,
            evidence.diagnostics.splitlines(),
            evidence.output,
            evidence.exception.splitlines(),
        ]
        found = [failures(text) for text in self._texts]
        #: Per source, the failures that are asked for a reason, in this order.
        self._sources = [list(self._worth_asking(one)) for one in found]
        #: What lost tasks and executors said that no later job outlived, the latest first.
        self._losses = [
            text
            for one in found
            for failure in reversed(one)
            if not failure.outlived and any(map(_LOST.search, failure.statements))
            for text in failure.statements
        ][:_REMEMBERED]

    def judged_by(self, layer: tuple[Rule, ...]) -> _Match | None:
        """Return the first rule that applies, in the order of :class:`Where`."""
        last = _looking(layer, Where.LAST)
        return (
            self._anywhere(_looking(layer, Where.ANYWHERE))
            or self._ending(_looking(layer, Where.FAILURE))
            or self._failures(layer)
            or self._facts(_looking(layer, Where.CAUSE))
            or _first(last, [text for source in self._sources for failure in source for text in failure.statements])
            or self._facts(last)
        )

    def last_words(self) -> str:
        """Return what was said last, for people to read."""
        return next((failure.statements[0] for source in self._sources for failure in source), "")

    def _anywhere(self, layer: list[Rule]) -> _Match | None:
        lines = [part for text in self._texts for line in text for part in unfolded(line)] if layer else []
        return _first(layer, lines) or self._facts(layer)

    def _ending(self, layer: list[Rule]) -> _Match | None:
        """The order of the rules decides between what was said last and what is known from outside."""
        endings = [text for source in self._sources for failure in source[:1] for text in failure.statements]
        match = next(filter(None, (_first([rule], endings) or self._facts([rule]) for rule in layer)), None)
        if match and match.rule.verdict is Verdict.INFRASTRUCTURE and any(map(self._rules.losses.search, endings)):
            return self._ran_out(layer) or match
        return match

    def _ran_out(self, layer: list[Rule]) -> _Match | None:
        """A lost executor is explained by what its tasks ran out of before."""
        return _first([rule for rule in layer if rule.verdict is Verdict.RESOURCE], self._losses)

    def _facts(self, layer: list[Rule]) -> _Match | None:
        code, state, pod = self._exit_code, self._evidence.driver_state, self._evidence.pod_reason
        for rule in layer:
            if pod in rule.pod_reasons:
                return _Match(rule, f"Kubernetes says {pod}")
            if code in rule.exit_codes:
                return _Match(rule, f"exit code {code}")
            if state in rule.driver_states:
                return _Match(rule, f"driver is {state}")
        return None

    def _failures(self, layer: tuple[Rule, ...]) -> _Match | None:
        whole, causes = _looking(layer, Where.FAILURE), _looking(layer, Where.CAUSE)
        for failure in (one for source in self._sources for one in source):
            match = _first(whole, failure.statements) or _root_first(causes, self._telling(failure))
            if match is not None:
                return match
        return None

    def _worth_asking(self, found: list[Failure]) -> Iterator[Failure]:
        """Yield what ended the application, and what came before it as long as that says nothing.

        What was survived counts only where something else broke; an exception that no rule knows is not explained by
        another that came before it.
        """
        broken = any(not failure.survivable for failure in found)
        for failure in last_failure_first(found)[:_ASKED]:
            if broken or not failure.survivable:
                yield failure
            if not failure.survivable and self._speaks_for_itself(failure):
                return

    def _speaks_for_itself(self, failure: Failure) -> bool:
        return any(failure.uncaught or names_exception(text) for text in self._telling(failure))

    def _telling(self, failure: Failure) -> list[str]:
        """Leave out what names no reason; an echo names none at all."""
        if any(self._rules.echoes.search(text) for text in failure.statements):
            return []
        return [text for text in failure.statements if not self._rules.hollow_statements.search(text)]


class _Reading:
    """A statement as rules see it."""

    def __init__(self, statement: str) -> None:
        self._plain = without_names(statement)
        self._general = without_data(self._plain)

    def fits(self, rule: Rule) -> bool:
        return rule.matches(self._general if rule.general else self._plain)


def _looking(layer: Iterable[Rule], where: Where) -> list[Rule]:
    return [rule for rule in layer if rule.where is where]


def _first(layer: Iterable[Rule], statements: list[str]) -> _Match | None:
    """The order of the rules decides."""
    read = [(text, _Reading(text)) for text in statements]
    return next((_Match(rule, text) for rule in layer for text, reading in read if reading.fits(rule)), None)


def _root_first(layer: list[Rule], statements: Iterable[str]) -> _Match | None:
    """The order of the statements decides."""
    read = ((text, _Reading(text)) for text in statements)
    return next((_Match(rule, text) for text, reading in read for rule in layer if reading.fits(rule)), None)


def _exit_code(evidence: Evidence) -> int | None:
    """A submission that only waited ends with 0 or 1 whatever happened; the driver's own code says more."""
    if evidence.exit_code not in {None, 0, 1}:
        return evidence.exit_code
    told = (_EXIT_CODE.search(cut(line)) for line in _lines_of_others(evidence))
    return next((int(found.group(1)) for found in told if found), evidence.exit_code)


def _lines_of_others(evidence: Evidence) -> list[str]:
    return [*evidence.driver_output, *evidence.diagnostics.splitlines(), *evidence.exception.splitlines()]


def _finding(match: _Match) -> Finding:
    line = shown(match.line)
    return Finding(verdict=match.rule.verdict, rule=match.rule.name, line=line, reason=f"{match.rule.reason}: {line}")


def _undecided(line: str) -> Finding:
    said = shown(line)
    return Finding(
        verdict=Verdict.UNKNOWN, rule="", line=said, reason=f"no rule knows this failure{': ' if said else ''}{said}"
    )
