"""What the HTTP API returns about Spark retries, health, and figures over time."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from airflow_delay_provider.api.models import Answer, MessageSummary, PageLinks

# -- Spark retries ---------------------------------------------------------------------------------------------------


class SparkAttempt(Answer):
    """One submission of a Spark job."""

    number: int
    started_at: datetime
    ended_at: datetime | None
    #: transient, infrastructure, resource, permanent or unknown; null while it runs and after success.
    verdict: str | None
    rule: str
    #: The deciding line of the log, or what it means.
    reason: str
    exit_code: int | None


class Budget(Answer):
    """How many failures of a kind are used up."""

    used: int
    limit: int


class SparkAttempts(Answer):
    """All attempts of a Spark task since it was started or cleared."""

    #: submitted, waiting or ended; null if the task has no Spark attempts.
    phase: Literal["submitted", "waiting", "ended"] | None
    attempts: list[SparkAttempt]
    #: By kind: attempts, resource, infrastructure. Empty if it is not known.
    budget: dict[str, Budget]


class Circuit(Answer):
    """A Spark cluster to which jobs are submitted again."""

    cluster: str
    #: An open circuit: the cluster is down, and waiting jobs are not submitted.
    is_open: bool
    down_since: datetime | None
    failed_checks: int
    next_check_at: datetime | None


class Retry(Answer):
    """A Spark task that waits for its next submission."""

    #: Id of its ticket: expedite it to retry now, cancel it to give up.
    message: MessageSummary
    attempt: int
    verdict: str
    reason: str
    #: backoff, cluster or rate_limit.
    waits_for: str
    extensions: int
    began_at: datetime
    next_try_at: datetime
    circuit: Circuit
    history: SparkAttempts


class RetryPage(Answer):
    """One page of waiting Spark tasks."""

    retries: list[Retry]
    next: str | None
    prev: str | None
    links: PageLinks
    continuation: str | None


# -- health and figures ----------------------------------------------------------------------------------------------


class HealthProblem(Answer):
    """Something that needs attention."""

    severity: Literal["error", "warning"]
    #: What it concerns, such as ``dispatcher`` or a connection.
    subject: str
    text: str
    #: What to do.
    remedy: str


class DispatcherLoop(Answer):
    """One loop of a dispatcher."""

    name: str
    is_healthy: bool
    last_success_at: datetime | None
    failures: int
    error: str | None
    #: How long the first message of the loop is overdue, 0 if none is; null if the loop dispatches and lists none.
    lag_ms: int | None


class DispatcherStatus(Answer):
    """A dispatcher by its last heartbeat."""

    name: str
    #: alive, unwell, stopped or gone.
    status: Literal["alive", "unwell", "stopped", "gone"]
    host: str
    pid: int
    version: str
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None
    #: The dispatcher's clock minus the database's.
    clock_skew_ms: int | None
    loops: list[DispatcherLoop]


class TopologyIssue(Answer):
    """A result of verifying the queues or topics of a broker."""

    text: str
    is_problem: bool


class BrokerStatus(Answer):
    """A broker, as a dispatcher checked it last."""

    connection: str
    is_reachable: bool
    checked_at: datetime
    description: str | None
    error: str | None
    #: Null if it was not verified.
    topology_verified_at: datetime | None
    topology_issues: list[TopologyIssue]
    #: The broker's clock minus the dispatcher's; null if it is unknown.
    clock_skew_ms: int | None


class Health(Answer):
    """Dispatchers, brokers and what needs attention."""

    problems: list[HealthProblem]
    dispatchers: list[DispatcherStatus]
    brokers: list[BrokerStatus]
    circuits: list[Circuit]
    #: The API server's clock minus the database's.
    api_clock_skew_ms: int
    now: datetime


class Lateness(Answer):
    """Percentiles of a histogram, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


class SeriesPoint(Answer):
    """What happened in one interval."""

    at: datetime
    scheduled: int
    dispatched: int
    cancelled: int
    dead: int
    #: Scheduled messages at the end of the interval; null if it was not sampled.
    depth: int | None
    #: Null without dispatched messages.
    lateness: Lateness | None
    #: Messages that were dispatched too early, which must never happen.
    early: int


class Series(Answer):
    """Figures over time."""

    step_seconds: int
    points: list[SeriesPoint]


class DueBin(Answer):
    """How many scheduled messages are due in one interval."""

    at: datetime
    count: int


class Upcoming(Answer):
    """When scheduled messages are due."""

    step_seconds: int
    bins: list[DueBin]


class Me(Answer):
    """You, and what you may do."""

    user: str
    #: Whether you may schedule messages, and change those that no task scheduled.
    is_administrator: bool
