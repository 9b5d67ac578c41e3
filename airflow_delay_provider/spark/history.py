"""What has happened to one Spark task so far, in a form that Airflow's task state store keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from airflow_delay_provider.spark.failures.verdict import Finding, Verdict

#: Under which the operator keeps it there.
HISTORY_KEY = "delay_spark_retries"
#: What an attempt comes to whose worker could tell nothing any more.
WORKER_LOST = Finding(
    verdict=Verdict.INFRASTRUCTURE, rule="worker-lost", line="", reason="the Airflow worker of this attempt is gone"
)
#: Airflow warns above 64 KiB for all attempts of a task together.
MAX_REASON_LENGTH = 200


class Phase(StrEnum):
    """Where a task stands, should its worker be gone."""

    #: A submission was begun and its end is not known.
    SUBMITTED = "submitted"
    #: The last attempt failed; a ticket is to bring the next.
    WAITING = "waiting"
    #: Succeeded, failed for good or given up: a next try of the task begins anew.
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One submission."""

    number: int
    started_at: datetime
    ended_at: datetime | None = None
    #: None while it runs, and after success.
    verdict: Verdict | None = None
    rule: str = ""
    reason: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The attempts since the task was started or cleared."""

    began_at: datetime
    phase: Phase = Phase.ENDED
    attempts: tuple[Attempt, ...] = ()
    #: When the next submission is due, of the last ticket.
    next_at: datetime | None = None

    @property
    def last(self) -> Attempt:
        """The latest attempt."""
        return self.attempts[-1]

    def begin_attempt(self, now: datetime) -> History:
        """Note a submission before it is made."""
        number = self.last.number + 1 if self.attempts else 1
        begun = Attempt(number=number, started_at=now)
        return replace(self, phase=Phase.SUBMITTED, attempts=(*self.attempts, begun), next_at=None)

    def fail_attempt(self, finding: Finding, now: datetime, *, exit_code: int | None = None) -> History:
        """Note how the last submission failed."""
        failed = replace(
            self.last,
            ended_at=now,
            verdict=finding.verdict,
            rule=finding.rule,
            reason=finding.reason[:MAX_REASON_LENGTH],
            exit_code=exit_code,
        )
        return replace(self, phase=Phase.ENDED, attempts=(*self.attempts[:-1], failed))

    def wait_until(self, next_at: datetime) -> History:
        """Note that a ticket brings the next submission then."""
        return replace(self, phase=Phase.WAITING, next_at=next_at)

    def end(self, now: datetime) -> History:
        """Note that no submission follows."""
        ended = tuple(each if each.ended_at else replace(each, ended_at=now) for each in self.attempts)
        return replace(self, phase=Phase.ENDED, attempts=ended, next_at=None)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "began_at": self.began_at.isoformat(),
            "phase": self.phase.value,
            "next_at": _iso(self.next_at),
            "attempts": [
                asdict(each)
                | {"started_at": _iso(each.started_at), "ended_at": _iso(each.ended_at)}
                | {"verdict": None if each.verdict is None else each.verdict.value}
                for each in self.attempts
            ],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> History:
        """Undo :meth:`as_json`."""
        return cls(
            began_at=datetime.fromisoformat(stored["began_at"]),
            phase=Phase(stored["phase"]),
            next_at=_moment(stored["next_at"]),
            attempts=tuple(
                Attempt(
                    number=each["number"],
                    started_at=datetime.fromisoformat(each["started_at"]),
                    ended_at=_moment(each["ended_at"]),
                    verdict=None if each["verdict"] is None else Verdict(each["verdict"]),
                    rule=each["rule"],
                    reason=each["reason"],
                    exit_code=each["exit_code"],
                )
                for each in stored["attempts"]
            ),
        )


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
