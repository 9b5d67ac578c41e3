"""One rule: which signs of a failure mean what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

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
    #: It knows nothing of the application's data, and is not shown what a message quotes of it.
    general: bool = False

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
