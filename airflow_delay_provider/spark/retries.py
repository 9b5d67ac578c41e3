"""The attempts of a Spark task so far, and the decision whether and when to submit its job again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.failures import Classification, Verdict

#: Of the history in Airflow's task state store.
HISTORY_KEY = "delay_spark_retries"
#: The result of an attempt whose worker was lost.
WORKER_LOST = Classification(
    verdict=Verdict.INFRASTRUCTURE, rule="worker-lost", line="", reason="the Airflow worker of this attempt was lost"
)
#: Airflow warns above 64 KiB for all attempts of a task together.
MAX_REASON_LENGTH = 200
_BACKOFF = Backoff(initial=timedelta(seconds=30), cap=timedelta(minutes=15), floor=timedelta(seconds=15))
#: The history of all attempts has to fit into Airflow's task state store.
_LIMITS = (("max_attempts", 1, 50), ("max_resource_failures", 0, 50), ("max_infrastructure_failures", 0, 100))
_COLUMNS = ("attempt", "started (UTC)", "took", "exit", "verdict", "rule", "reason")


class Phase(StrEnum):
    """The state of a task, from which it continues if its worker is lost."""

    #: A submission began, and its result is not known.
    SUBMITTED = "submitted"
    #: The last attempt failed; a ticket releases the next.
    WAITING = "waiting"
    #: Succeeded, failed finally or given up: the next try of the task starts over.
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One submission."""

    number: int
    started_at: datetime
    ended_at: datetime | None = None
    #: None while the job runs, and after success.
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
    #: When the last ticket is due.
    next_at: datetime | None = None
    #: Failures used and allowed, by kind, when it was stored.
    budget: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)

    @property
    def last(self) -> Attempt:
        """The latest attempt."""
        return self.attempts[-1]

    def begin_attempt(self, now: datetime) -> History:
        """Record a submission before it is made."""
        number = self.last.number + 1 if self.attempts else 1
        begun = Attempt(number=number, started_at=now)
        return replace(self, phase=Phase.SUBMITTED, attempts=(*self.attempts, begun), next_at=None)

    def fail_attempt(self, classification: Classification, now: datetime, *, exit_code: int | None = None) -> History:
        """Record how the last submission failed."""
        failed = replace(
            self.last,
            ended_at=now,
            verdict=classification.verdict,
            rule=classification.rule,
            reason=classification.reason[:MAX_REASON_LENGTH],
            exit_code=exit_code,
        )
        return replace(self, phase=Phase.ENDED, attempts=(*self.attempts[:-1], failed))

    def wait_until(self, next_at: datetime) -> History:
        """Record that a ticket releases the next submission at ``next_at``."""
        return replace(self, phase=Phase.WAITING, next_at=next_at)

    def end(self, now: datetime) -> History:
        """Record that no submission follows."""
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
            budget={kind: (used, limit) for kind, (used, limit) in stored.get("budget", {}).items()},
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkRetries:
    """How often and how soon a job is submitted again, by the kind of failure.

    With the defaults the delay before retry 1, 2, 3 ... is drawn from 15-30, 15-60, 15-120 ... up to 15-900 seconds.
    """

    #: How many submissions the application itself may fail (transient, resource and unknown failures).
    max_attempts: int = 5
    #: How many of these may fail for lack of memory, disk or quota.
    max_resource_failures: int = 2
    #: How many failures of the cluster are tolerated; they do not count as attempts of the application.
    max_infrastructure_failures: int = 20
    #: No submission begins later than this after the first one.
    max_elapsed: timedelta = timedelta(hours=24)
    #: Grows with each failure of the same kind.
    backoff: Backoff = _BACKOFF
    #: The verdict for a failure that no rule knows.
    unknown_as: Verdict = Verdict.TRANSIENT

    def __post_init__(self) -> None:
        for name, least, most in _LIMITS:
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
                raise ConfigurationError(f"{name}: {given!r} is not a number of failures; use {least} to {most}")
        if self.max_elapsed <= timedelta(0):
            raise ConfigurationError(
                f"max_elapsed: {self.max_elapsed} is not a positive duration; give a timedelta above 0"
            )
        if self.unknown_as not in set(Verdict) - {Verdict.UNKNOWN}:
            raise ConfigurationError(
                f"unknown_as: {self.unknown_as!r} does not decide; use transient, infrastructure, resource or permanent"
            )
        object.__setattr__(self, "unknown_as", Verdict(self.unknown_as))


def as_stored(history: History, retries: SparkRetries) -> dict[str, Any]:
    """Return the history for Airflow's task state store, with the budget that it uses up."""
    failures = _count(history, retries)
    budget = {
        "attempts": (len(history.attempts) - failures[Verdict.INFRASTRUCTURE], retries.max_attempts),
        "resource": (failures[Verdict.RESOURCE], retries.max_resource_failures),
        "infrastructure": (failures[Verdict.INFRASTRUCTURE], retries.max_infrastructure_failures),
    }
    return history.as_json() | {"budget": {kind: list(each) for kind, each in budget.items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Submit again after ``delay``, or not at all for ``reason``."""

    delay: timedelta | None
    #: One line; empty if the job is submitted again.
    reason: str = ""


def decide(history: History, retries: SparkRetries, *, now: datetime, random: Callable[[], float]) -> Decision:
    """Decide what to do after the last attempt of ``history``, which has failed."""
    verdict = _counted_as(history.last.verdict, retries)
    if verdict is Verdict.PERMANENT:
        return Decision(delay=None, reason="it would fail again")
    failures = _count(history, retries)
    if verdict is Verdict.INFRASTRUCTURE:
        spent, limit, what = failures[verdict], retries.max_infrastructure_failures, "failures of the cluster"
    elif verdict is Verdict.RESOURCE and failures[verdict] > retries.max_resource_failures:
        spent, limit, what = failures[verdict], retries.max_resource_failures, "failures for lack of resources"
    else:
        # The first submission is an attempt too, so one failure fewer than attempts may follow it.
        own = sum(n for kind, n in failures.items() if kind is not Verdict.INFRASTRUCTURE)
        spent, limit, what = own, retries.max_attempts - 1, f"retries ({retries.max_attempts} attempts)"
    if spent > limit:
        return Decision(delay=None, reason=f"all {limit} {what} are used up")
    delay = retries.backoff.delay(failures[verdict], random)
    if now + delay - history.began_at > retries.max_elapsed:
        return Decision(delay=None, reason=f"max_elapsed {retries.max_elapsed} would be over before the next try")
    return Decision(delay=delay)


def _count(history: History, retries: SparkRetries) -> dict[Verdict, int]:
    failures = dict.fromkeys(Verdict, 0)
    for attempt in history.attempts:
        if attempt.verdict is not None:
            failures[_counted_as(attempt.verdict, retries)] += 1
    return failures


def _counted_as(verdict: Verdict | None, retries: SparkRetries) -> Verdict:
    return retries.unknown_as if verdict in (None, Verdict.UNKNOWN) else verdict


def attempt_table(history: History) -> Iterator[str]:
    """Yield the attempts as lines of a table for the log."""
    rows = [_COLUMNS, *(_row(attempt) for attempt in history.attempts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(attempt: Attempt) -> tuple[str, ...]:
    took = "" if attempt.ended_at is None else f"{(attempt.ended_at - attempt.started_at).total_seconds():.0f} s"
    return (
        str(attempt.number),
        f"{attempt.started_at:%Y-%m-%d %H:%M:%S}",
        took,
        "" if attempt.exit_code is None else str(attempt.exit_code),
        "" if attempt.verdict is None else attempt.verdict.value,
        attempt.rule,
        attempt.reason,
    )
