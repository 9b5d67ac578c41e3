"""What an exception of the Spark provider tells of a failure: the evidence where nobody kept more."""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_delay_provider.spark.failures import Evidence

_TAIL = "\nLast spark-submit output:\n"
#: The command holds names and arguments of the user, which would be taken for signs of the failure.
_COMMAND = re.compile(r"^Cannot execute: .*\. (?=Error code is: )", re.DOTALL)
#: The driver's own, where it is known, before that of spark-submit.
_EXIT_CODES = (
    re.compile(r"Kubernetes spark exit code is: (-?\d+)"),
    re.compile(r"\(phase=Failed exit_code=(\d+)"),
    re.compile(r"Error code is: (-?\d+)"),
)
_DRIVER_STATE = re.compile(r"^Driver \S+ exited with status ([A-Z]+)")
_DIAGNOSTICS = re.compile(r"^YARN application .*?\nDiagnostics: (.*)", re.DOTALL)
_POD_REASON = re.compile(r"\(phase=Failed .*reason=(\w+)\)")


def evidence_of(error: BaseException) -> Evidence:
    """Return the ``evidence`` that an exception of the chain carries, else what the texts of the chain tell."""
    chain = list(_chain_of(error))
    for each in chain:
        carried = getattr(each, "evidence", None)
        if isinstance(carried, Evidence):
            return carried
    told = [str(each) for each in chain]
    said = [_COMMAND.sub("", text.partition(_TAIL)[0]) for text in told]
    return Evidence(
        exit_code=next((int(code) for pattern in _EXIT_CODES for code in _found(pattern, said)), None),
        exception="\nCaused by: ".join(
            f"{type(each).__name__}: {text}" for each, text in zip(chain, said, strict=True)
        ),
        output=[line for text in told for line in text.partition(_TAIL)[2].splitlines()],
        driver_state=next(_found(_DRIVER_STATE, said), None),
        diagnostics=next(_found(_DIAGNOSTICS, said), ""),
        pod_reason=next((reason for reason in _found(_POD_REASON, said) if reason != "None"), None),
    )


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what caused it, as a traceback shows them."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _found(pattern: re.Pattern[str], texts: list[str]) -> Iterator[str]:
    return (match[1] for text in texts if (match := pattern.search(text)))
