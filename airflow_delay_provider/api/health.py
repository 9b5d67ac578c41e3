"""Find what needs attention, and say what to do about it. Pure: the routes read, this decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from airflow_delay_provider.api.auth import mask_secrets
from airflow_delay_provider.api.overview_models import HealthProblem
from airflow_delay_provider.brokers.ledger.broker_status import BrokerStatus
from airflow_delay_provider.brokers.ledger.cluster_circuits import Outage
from airflow_delay_provider.brokers.ledger.heartbeats import DispatcherRecord, find_gap
from airflow_delay_provider.brokers.ledger.search import MOST_OVERDUE

#: Clocks that differ by less are in order; brokers tell theirs in whole seconds.
TOLERATED_SKEW = timedelta(seconds=3)
#: Messages may be this late before it is reported.
TOLERATED_LATENESS = timedelta(seconds=60)
_SYNCHRONISE = "Synchronise the clocks of both machines, for example with NTP."


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What the ledger says at one moment."""

    now: datetime
    database_now: datetime
    #: The last seen first.
    dispatchers: Sequence[DispatcherRecord]
    brokers: Sequence[BrokerStatus]
    outages: Mapping[str, Outage]
    #: Scheduled messages of embedded channels.
    waiting_embedded: int
    #: Connections to which ledger-held messages have to be sent.
    waiting_destinations: Sequence[str]
    overdue: int
    oldest_due: datetime | None

    @property
    def alive(self) -> list[DispatcherRecord]:
        """The dispatchers that run."""
        return [each for each in self.dispatchers if each.is_alive]

    @property
    def api_skew(self) -> timedelta:
        """The API server's clock minus the database's."""
        return self.now - self.database_now


def find_problems(observed: Observed) -> list[HealthProblem]:
    """Return what needs attention, the worst first."""
    problems = [
        *_absent_dispatchers(observed),
        *_unserved_connections(observed),
        *_unreachable_brokers(observed),
        *_failing_loops(observed),
        *_topology(observed),
        *_clocks(observed),
        *_circuits(observed),
        *_overdue(observed),
    ]
    return sorted(problems, key=lambda problem: problem.severity != "error")


def _problem(severity: Literal["error", "warning"], subject: str, text: str, remedy: str) -> HealthProblem:
    sentence: str = mask_secrets(text)
    return HealthProblem(
        severity=severity, subject=subject, text=f"{sentence[:1].upper()}{sentence[1:]}", remedy=mask_secrets(remedy)
    )


def _absent_dispatchers(observed: Observed) -> Iterator[HealthProblem]:
    needed = observed.waiting_embedded > 0 or bool(observed.waiting_destinations)
    last = next(iter(observed.dispatchers), None)
    was_stopped = last is None or last.stopped_at is not None
    if observed.alive or (was_stopped and not needed):
        return
    gap = find_gap(observed.dispatchers)
    if gap is not None:
        yield _problem(
            "error",
            "dispatcher",
            f"{gap.problem}. Messages in the ledger wait until one runs.",
            "Start one with `airflow delay dispatcher`.",
        )


def _unserved_connections(observed: Observed) -> Iterator[HealthProblem]:
    """Connections whose last dispatcher has died."""
    for what, option, consequence in (
        ("kafka_connections", "--kafka", "Delayed messages of this Kafka connection wait until one runs."),
        ("index_connections", "--index", "Messages of this connection are not listed until one runs."),
    ):
        last = {conn_id: each for each in reversed(observed.dispatchers) for conn_id in getattr(each, what)}
        for conn_id in sorted(conn_id for conn_id, each in last.items() if each.status == "gone"):
            yield _problem(
                "error",
                conn_id,
                f"No dispatcher runs with {option} {conn_id}. {consequence}",
                f"Start one with `airflow delay dispatcher {option} {conn_id}`.",
            )


def _unreachable_brokers(observed: Observed) -> Iterator[HealthProblem]:
    for broker in observed.brokers:
        if not broker.reachable and not broker.is_stale:
            yield _problem(
                "error",
                broker.conn_id,
                f"the broker of connection {broker.conn_id!r} cannot be used: {broker.error}",
                "Start the broker, or correct the connection. Its messages wait, and none is lost.",
            )


def _failing_loops(observed: Observed) -> Iterator[HealthProblem]:
    """Loops that fail for another reason than an unreachable broker, which is reported already."""
    unreachable = {each.conn_id for each in observed.brokers if not each.reachable and not each.is_stale}
    for dispatcher in observed.alive:
        for loop in dispatcher.loops:
            if loop.problem is not None and loop.name.partition(":")[2] not in unreachable:
                yield _problem(
                    "error",
                    dispatcher.owner,
                    f"loop {loop.name} of dispatcher {dispatcher.owner} {loop.problem}",
                    f"Read the log of the dispatcher on {dispatcher.host}; it tries again by itself.",
                )


def _topology(observed: Observed) -> Iterator[HealthProblem]:
    for broker in observed.brokers:
        for issue in broker.topology_issues:
            if issue.is_problem and not broker.is_stale:
                yield _problem(
                    "error",
                    broker.conn_id,
                    issue.text,
                    f"Run `airflow delay topology verify --conn-id {broker.conn_id}`, then `topology create`.",
                )


def _clocks(observed: Observed) -> Iterator[HealthProblem]:
    if abs(observed.api_skew) > TOLERATED_SKEW:
        yield _skew("API server", "the API server's clock", "the database's", observed.api_skew)
    for dispatcher in observed.alive:
        if dispatcher.clock_skew is not None and abs(dispatcher.clock_skew) > TOLERATED_SKEW:
            yield _skew(
                dispatcher.owner, f"the clock of dispatcher {dispatcher.owner}", "the database's", dispatcher.clock_skew
            )
    for broker in observed.brokers:
        if broker.clock_skew is not None and abs(broker.clock_skew) > TOLERATED_SKEW and not broker.is_stale:
            whose = f"the clock of the broker of connection {broker.conn_id!r}"
            yield _skew(broker.conn_id, whose, "the dispatcher's", broker.clock_skew)


def _skew(subject: str, whose: str, other: str, skew: timedelta) -> HealthProblem:
    seconds = skew.total_seconds()
    text = f"{whose} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} {other}."
    return _problem("error", subject, f"{text} Messages are early or late by as much.", _SYNCHRONISE)


def _circuits(observed: Observed) -> Iterator[HealthProblem]:
    for cluster, outage in sorted(observed.outages.items()):
        yield _problem(
            "warning",
            cluster,
            f"Spark cluster {cluster} is down since {outage.since:%Y-%m-%d %H:%M:%S} UTC"
            f" ({outage.failed_checks} failed checks). Retries wait and use up no attempts.",
            f"Start the cluster. The next check is at {outage.next_check_at:%H:%M:%S} UTC.",
        )


def _overdue(observed: Observed) -> Iterator[HealthProblem]:
    if observed.oldest_due is None or observed.now - observed.oldest_due < TOLERATED_LATENESS:
        return
    n = observed.overdue
    many = (
        f"more than {MOST_OVERDUE} messages are"
        if n > MOST_OVERDUE
        else f"{n} messages are"
        if n != 1
        else "1 message is"
    )
    yield _problem(
        "warning",
        "messages",
        f"{many} overdue, the first since {observed.oldest_due:%Y-%m-%d %H:%M:%S} UTC.",
        "See whether a dispatcher runs and whether the brokers accept messages.",
    )
