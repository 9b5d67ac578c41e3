"""Everything that is known of one failed attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a submission left behind; any part may be missing."""

    #: Of spark-submit; a signal shows as -n or 128 + n.
    exit_code: int | None = None
    #: Texts of the exception chain, joined by newlines.
    exception: str = ""
    #: What spark-submit printed: :meth:`OutputWindow.lines`.
    output: Sequence[str] = ()
    #: Standalone cluster mode: FAILED, ERROR, KILLED ...
    driver_state: str | None = None
    #: Log of a driver that ran elsewhere, where it could be fetched.
    driver_output: Sequence[str] = ()
    #: What YARN says of the application.
    diagnostics: str = ""
    #: Kubernetes: OOMKilled, Evicted ...
    pod_reason: str | None = None
