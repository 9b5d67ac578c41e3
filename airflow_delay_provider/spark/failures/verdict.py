"""What a failure was, in one word, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether trying again can help."""

    #: The application met something outside that may pass: a source refused, a lock, a timeout, throttling.
    TRANSIENT = "transient"
    #: The cluster lost something; the application is not to blame.
    INFRASTRUCTURE = "infrastructure"
    #: Too little memory, disk or quota; trying again rarely helps.
    RESOURCE = "resource"
    #: It will fail again: code, query, arguments, missing files, permissions.
    PERMANENT = "permanent"
    #: No rule knows it; the policy's default decides.
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A verdict with its explanation."""

    verdict: Verdict
    #: Name of the rule that decided; empty if none did.
    rule: str
    #: The decisive line, shortened, secrets masked.
    line: str
    #: One line for people.
    reason: str
