"""The result of classifying a failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
