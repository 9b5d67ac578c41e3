"""When a Spark job that failed is submitted again: decisions over what has happened so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.spark.failures.verdict import Verdict
from airflow_delay_provider.spark.history import History

_BACKOFF = Backoff(initial=timedelta(seconds=30), cap=timedelta(minutes=15), floor=timedelta(seconds=15))
#: The history of all attempts has to fit into Airflow's task state store.
_LIMITS = (("max_attempts", 1, 50), ("max_resource_failures", 0, 50), ("max_infrastructure_failures", 0, 100))


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkRetries:
    """How often and how soon a job is submitted again, by what made it fail.

    With the defaults the delay before retry 1, 2, 3 ... is drawn from 15-30, 15-60, 15-120 ... up to 15-900 seconds.
    """

    #: Submissions in all that the application itself may make fail (transient, resource and unknown failures).
    max_attempts: int = 5
    #: Of these, how many may fail for want of memory, disk or quota.
    max_resource_failures: int = 2
    #: Failures of the cluster, which do not count as the application's attempts.
    max_infrastructure_failures: int = 20
    #: No submission begins later than this after the first one.
    max_elapsed: timedelta = timedelta(hours=24)
    #: Grows with each failure of the same kind.
    backoff: Backoff = _BACKOFF
    #: What a failure is taken for that no rule knows.
    unknown_as: Verdict = Verdict.TRANSIENT

    def __post_init__(self) -> None:
        for name, least, most in _LIMITS:
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
                raise ConfigurationError(f"{name}: {given!r} is not a number of failures; use {least} to {most}")
        if self.max_elapsed <= timedelta(0):
            raise ConfigurationError(f"max_elapsed: {self.max_elapsed} is no time; give a timedelta above 0")
        if self.unknown_as not in set(Verdict) - {Verdict.UNKNOWN}:
            raise ConfigurationError(
                f"unknown_as: {self.unknown_as!r} is not a verdict that decides; use transient, infrastructure,"
                " resource or permanent"
            )
        object.__setattr__(self, "unknown_as", Verdict(self.unknown_as))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What follows from a failure: another submission after ``delay``, or none, and why not."""

    delay: timedelta | None
    #: One line; empty when it is tried again.
    reason: str = ""


def decide(history: History, retries: SparkRetries, *, now: datetime, random: Callable[[], float]) -> Decision:
    """Say what to do after the last attempt of ``history``, which has failed."""
    verdict = _counted_as(history.last.verdict, retries)
    if verdict is Verdict.PERMANENT:
        return Decision(delay=None, reason="it would fail again")
    failures = _count(history, retries)
    if verdict is Verdict.INFRASTRUCTURE:
        spent, limit, what = failures[verdict], retries.max_infrastructure_failures, "failures of the cluster"
    elif verdict is Verdict.RESOURCE and failures[verdict] > retries.max_resource_failures:
        spent, limit, what = failures[verdict], retries.max_resource_failures, "failures for want of resources"
    else:
        # The first submission is an attempt too, hence the failure that uses up the last one.
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
