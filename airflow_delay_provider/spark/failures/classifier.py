"""Classify a failure from its evidence, which can be read from an exception of the Spark provider.

The failure that ended the application decides, not those it survived: the last traceback or uncaught exception first,
and in it the root cause before the exceptions that wrap it. Earlier failures count only if that one is uninformative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from airflow_delay_provider.spark.failures.log_parser import Failure, order_by_weight, parse_failures
from airflow_delay_provider.spark.failures.log_text import cut, display_line, expand_json, without_data, without_names
from airflow_delay_provider.spark.failures.patterns import EXCEPTION, NAMES_EXCEPTION
from airflow_delay_provider.spark.failures.rules import Rule, Rules, Verdict, Where

_EXIT_CODE_OF_DRIVER = re.compile(
    r"(?:Error code is: |Kubernetes spark exit code is: |exit_code=|User application exited with (?:status )?)"
    r"(-?\d{1,3})\b"
)
#: How many failures of one log are searched for a reason.
_MAX_FAILURES = 20
_LOST = re.compile(r"Lost (?:task|executor) ")
#: How many statements of lost tasks and executors are searched for a resource that ran out.
_MAX_LOSSES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Everything that is known of a failed attempt; any part may be missing."""

    #: Of spark-submit; a signal shows as -n or 128 + n.
    exit_code: int | None = None
    #: Texts of the exception chain, joined by newlines.
    exception: str = ""
    #: Output of spark-submit: :meth:`OutputWindow.lines`.
    output: Sequence[str] = ()
    #: Standalone cluster mode: FAILED, ERROR, KILLED ...
    driver_state: str | None = None
    #: Log of a driver that ran on the cluster, if it could be fetched.
    driver_output: Sequence[str] = ()
    #: Diagnostics of the YARN application.
    diagnostics: str = ""
    #: Kubernetes: OOMKilled, Evicted ...
    pod_reason: str | None = None


_TAIL = "\nLast spark-submit output:\n"
#: The command holds names and arguments of the user, which must not be taken for the failure.
_COMMAND = re.compile(r"^Cannot execute: .*\. (?=Error code is: )", re.DOTALL)
#: The driver's own code before that of spark-submit.
_EXIT_CODES = (
    re.compile(r"Kubernetes spark exit code is: (-?\d+)"),
    re.compile(r"\(phase=Failed exit_code=(\d+)"),
    re.compile(r"Error code is: (-?\d+)"),
)
_DRIVER_STATE = re.compile(r"^Driver \S+ exited with status ([A-Z]+)")
_DIAGNOSTICS = re.compile(r"^YARN application .*?\nDiagnostics: (.*)", re.DOTALL)
_POD_REASON = re.compile(r"\(phase=Failed .*reason=(\w+)\)")


def evidence_of(error: BaseException) -> Evidence:
    """Return the ``evidence`` attribute of an exception in the chain, else read the messages of the chain."""
    chain = list(_chain_of(error))
    for each in chain:
        carried = getattr(each, "evidence", None)
        if isinstance(carried, Evidence):
            return carried
    texts = [str(each) for each in chain]
    messages = [_COMMAND.sub("", text.partition(_TAIL)[0]) for text in texts]
    return Evidence(
        exit_code=next((int(code) for pattern in _EXIT_CODES for code in _found(pattern, messages)), None),
        exception="\nCaused by: ".join(
            f"{type(each).__name__}: {text}" for each, text in zip(chain, messages, strict=True)
        ),
        output=[line for text in texts for line in text.partition(_TAIL)[2].splitlines()],
        driver_state=next(_found(_DRIVER_STATE, messages), None),
        diagnostics=next(_found(_DIAGNOSTICS, messages), ""),
        pod_reason=next((reason for reason in _found(_POD_REASON, messages) if reason != "None"), None),
    )


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, as a traceback shows them."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _found(pattern: re.Pattern[str], texts: list[str]) -> Iterator[str]:
    return (match[1] for text in texts if (match := pattern.search(text)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """A verdict with its explanation."""

    verdict: Verdict
    #: Name of the rule that decided; empty if none did.
    rule: str
    #: The decisive line, shortened, secrets masked.
    line: str
    #: One line for people.
    reason: str


@dataclass(frozen=True, slots=True)
class _Match:
    rule: Rule
    line: str


def classify(evidence: Evidence, rules: Rules | None = None) -> Classification:
    """Return the verdict and its explanation; without ``rules`` the built-in ones decide."""
    rules = rules or Rules.builtin()
    case = _Case(evidence, rules)
    for layer in rules.layers:
        match = case.match(layer)
        if match is not None:
            return _classification(match)
    return _unknown(case.last_statement())


class _Case:
    """The evidence of one failed attempt, parsed once."""

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
        found = [parse_failures(text) for text in self._texts]
        #: For each source, the failures to search for a reason, in this order.
        self._sources = [list(self._relevant(one)) for one in found]
        #: Statements of lost tasks and executors after which no job succeeded, the latest first.
        self._losses = [
            text
            for one in found
            for failure in reversed(one)
            if not failure.outlived and any(map(_LOST.search, failure.statements))
            for text in failure.statements
        ][:_MAX_LOSSES]

    def match(self, layer: tuple[Rule, ...]) -> _Match | None:
        """Return the first rule that applies, in the order of :class:`Where`."""
        last = _rules_at(layer, Where.LAST)
        return (
            self._anywhere(_rules_at(layer, Where.ANYWHERE))
            or self._ending(_rules_at(layer, Where.FAILURE))
            or self._failures(layer)
            or self._facts(_rules_at(layer, Where.CAUSE))
            or _match_by_rule(last, [text for failure in self._all_failures() for text in failure.statements])
            or self._facts(last)
        )

    def last_statement(self) -> str:
        """Return the root cause of the last failure, for people to read."""
        return next((failure.statements[0] for failure in self._all_failures()), "")

    def _all_failures(self) -> Iterator[Failure]:
        return (failure for source in self._sources for failure in source)

    def _anywhere(self, layer: list[Rule]) -> _Match | None:
        lines = [part for text in self._texts for line in text for part in expand_json(line)] if layer else []
        return _match_by_rule(layer, lines) or self._facts(layer)

    def _ending(self, layer: list[Rule]) -> _Match | None:
        """Match what ended the application: the order of the rules decides between its statements and the facts."""
        endings = [text for source in self._sources for failure in source[:1] for text in failure.statements]
        match = next(filter(None, (_match_by_rule([rule], endings) or self._facts([rule]) for rule in layer)), None)
        if (
            match
            and match.rule.verdict is Verdict.INFRASTRUCTURE
            and any(map(self._rules.executor_losses.search, endings))
        ):
            return self._exhausted_resource(layer) or match
        return match

    def _exhausted_resource(self, layer: list[Rule]) -> _Match | None:
        """A lost executor is explained by a resource that its tasks ran out of before."""
        return _match_by_rule([rule for rule in layer if rule.verdict is Verdict.RESOURCE], self._losses)

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
        whole, causes = _rules_at(layer, Where.FAILURE), _rules_at(layer, Where.CAUSE)
        for failure in self._all_failures():
            match = _match_by_rule(whole, failure.statements) or _match_by_statement(causes, self._informative(failure))
            if match is not None:
                return match
        return None

    def _relevant(self, found: list[Failure]) -> Iterator[Failure]:
        """Yield the failure that ended the application, and earlier ones until one is conclusive.

        Survived failures count only if something else broke. An exception that no rule knows is not explained by an
        earlier one.
        """
        broken = any(not failure.survivable for failure in found)
        for failure in order_by_weight(found)[:_MAX_FAILURES]:
            if broken or not failure.survivable:
                yield failure
            if not failure.survivable and self._is_conclusive(failure):
                return

    def _is_conclusive(self, failure: Failure) -> bool:
        return any(failure.uncaught or _names_exception(text) for text in self._informative(failure))

    def _informative(self, failure: Failure) -> list[str]:
        """Return the statements that name a reason; a follow-up failure has none."""
        if any(self._rules.follow_up_failures.search(text) for text in failure.statements):
            return []
        return [text for text in failure.statements if not self._rules.uninformative_statements.search(text)]


class _Statement:
    """A statement without the data that rules must not see."""

    def __init__(self, statement: str) -> None:
        self._plain = without_names(statement)
        self._general = without_data(self._plain)

    def matches(self, rule: Rule) -> bool:
        return rule.matches(self._general if rule.general else self._plain)


def _names_exception(statement: str) -> bool:
    """Tell whether the statement is an exception, and not just a remark."""
    return bool(EXCEPTION.match(statement) or NAMES_EXCEPTION.search(statement))


def _rules_at(layer: Iterable[Rule], where: Where) -> list[Rule]:
    return [rule for rule in layer if rule.where is where]


def _match_by_rule(layer: Iterable[Rule], statements: list[str]) -> _Match | None:
    """The order of the rules decides."""
    parsed = [(text, _Statement(text)) for text in statements]
    return next((_Match(rule, text) for rule in layer for text, statement in parsed if statement.matches(rule)), None)


def _match_by_statement(layer: list[Rule], statements: Iterable[str]) -> _Match | None:
    """The order of the statements decides."""
    parsed = ((text, _Statement(text)) for text in statements)
    return next((_Match(rule, text) for text, statement in parsed for rule in layer if statement.matches(rule)), None)


def _exit_code(evidence: Evidence) -> int | None:
    """Prefer the driver's own code: a submission that only waits exits with 0 or 1 whatever happens."""
    if evidence.exit_code not in {None, 0, 1}:
        return evidence.exit_code
    codes = (_EXIT_CODE_OF_DRIVER.search(cut(line)) for line in _driver_lines(evidence))
    return next((int(found.group(1)) for found in codes if found), evidence.exit_code)


def _driver_lines(evidence: Evidence) -> list[str]:
    return [*evidence.driver_output, *evidence.diagnostics.splitlines(), *evidence.exception.splitlines()]


def _classification(match: _Match) -> Classification:
    line = display_line(match.line)
    return Classification(
        verdict=match.rule.verdict, rule=match.rule.name, line=line, reason=f"{match.rule.reason}: {line}"
    )


def _unknown(line: str) -> Classification:
    line = display_line(line)
    reason = f"no rule knows this failure: {line}" if line else "no rule knows this failure"
    return Classification(verdict=Verdict.UNKNOWN, rule="", line=line, reason=reason)
