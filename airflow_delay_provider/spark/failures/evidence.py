"""The evidence of one failed attempt, and how to read it from an exception of the Spark provider."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
