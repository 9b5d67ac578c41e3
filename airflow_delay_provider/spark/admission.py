"""Admission of Spark retries: a due ticket may submit its job once the cluster is up and the token bucket has room."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, InvalidMessageError
from airflow_delay_provider.spark.cluster.address import find_cluster
from airflow_delay_provider.spark.cluster.health_check import check_cluster
from airflow_delay_provider.spark.tickets import Ticket, WaitsFor
from airflow_delay_provider.triggers.broker_thread import BrokerThread

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.cluster_circuits import Outage
    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.domain.clock import Clock
    from airflow_delay_provider.hooks.delay import DelayHook
    from airflow_delay_provider.spark.cluster.address import ClusterAddress

log = logging.getLogger(__name__)

#: Between two checks of a cluster that is down, however many tasks wait for it.
CHECKS = Backoff(initial=timedelta(seconds=10), cap=timedelta(seconds=60), floor=timedelta(seconds=5))
#: Of the key in the ledger.
MAX_NAME_LENGTH = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBucket:
    """How many failed jobs are submitted again to one cluster."""

    per_second: float = 1.0
    burst: int = 5

    def __post_init__(self) -> None:
        if not 0.001 <= self.per_second <= 1000:
            raise ConfigurationError(
                f"[delay] spark_submissions_per_second: {self.per_second} is not a rate; use 0.001 to 1000"
            )
        if self.burst < 1:
            raise ConfigurationError(f"[delay] spark_submission_burst: {self.burst} is too small; use 1 or more")

    @classmethod
    def from_airflow(cls) -> TokenBucket:
        """Read section ``[delay]`` of Airflow's configuration."""
        from airflow.sdk.configuration import conf

        return cls(
            per_second=conf.getfloat("delay", "spark_submissions_per_second", fallback=1.0),
            burst=conf.getint("delay", "spark_submission_burst", fallback=5),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionDecision:
    """When a submission may begin or, while the cluster is down, when to ask again."""

    at: datetime
    #: Why the cluster counts as down; empty when it is up.
    down: str = ""


class ClusterCircuit:
    """The circuit breaker and the token buckets of one cluster, shared by all processes that use one ledger.

    It opens when a check finds the cluster down. While it is open, only the next due check contacts the cluster, and
    the time between checks grows. It closes when a check finds the cluster up.
    """

    def __init__(
        self,
        ledger: Ledger,
        cluster: ClusterAddress,
        *,
        bucket: TokenBucket | None = None,
        clock: Clock | None = None,
        random_source: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._name = _key_of(cluster.name)
        self._bucket = bucket or TokenBucket.from_airflow()
        self._clock = clock or SystemClock()
        self._random = random_source

    def known_outage(self) -> Outage | None:
        """Return the outage that a check has found; check again if that is due."""
        outage = self._find_outage()
        if outage is None or self._is_open(outage):
            return outage
        return None if self._check(outage) is None else self._find_outage()

    def decide(self, n: int, *, with_token: int = 0) -> list[AdmissionDecision]:
        """Check the cluster once for ``n`` submissions and take a token for each.

        The first ``with_token`` of them already have theirs.
        """
        if not n:
            return []
        known = self._find_outage()
        if known is not None and self._is_open(known):
            reason = f"{self._cluster.name} was down at the last check, since {known.since:%H:%M:%S} UTC"
            return [AdmissionDecision(at=known.next_check_at, down=reason)] * n
        down = self._check(known)
        if down is not None:
            return [down] * n
        tokens = self.take_tokens(n - with_token) if n > with_token else []
        return [AdmissionDecision(at=at) for at in [self._clock.now()] * with_token + tokens]

    def take_tokens(self, n: int) -> list[datetime]:
        """Return ``n`` times, from now on, at which waiting tasks may come back."""
        return self._take_tokens(self._name, n)

    def take_submission_tokens(self, n: int) -> list[datetime]:
        """Return ``n`` times, from now on, at which tasks that came back may submit: nearly always now."""
        return self._take_tokens(_key_of(f"{self._cluster.name}#submit"), n)

    def _take_tokens(self, name: str, n: int) -> list[datetime]:
        from airflow_delay_provider.brokers.ledger import cluster_circuits

        every, now, burst = timedelta(seconds=1 / self._bucket.per_second), self._clock.now(), self._bucket.burst
        return self._ledger.transact(
            lambda connection: cluster_circuits.take_tokens(connection, name, n, now=now, every=every, burst=burst)
        )

    def _check(self, known: Outage | None) -> AdmissionDecision | None:
        """Check the cluster and record the result; return None when it is up."""
        health = check_cluster(self._cluster)
        if not health.is_up:
            return self._open(known, health.reason)
        if known is not None:
            self._close()
        return None

    def _open(self, known: Outage | None, reason: str) -> AdmissionDecision:
        """Record a failed check; ``known`` is from before it, so that simultaneous checks count as one."""
        from airflow_delay_provider.brokers.ledger import cluster_circuits

        now = self._clock.now()
        pause = CHECKS.delay(1 if known is None else known.failed_checks + 1, self._random)
        self._ledger.transact(
            lambda connection: cluster_circuits.open_circuit(connection, self._name, known=known, now=now, pause=pause)
        )
        return AdmissionDecision(at=now + pause, down=reason)

    def _close(self) -> None:
        from airflow_delay_provider.brokers.ledger import cluster_circuits

        self._ledger.transact(lambda connection: cluster_circuits.close_circuit(connection, self._name))

    def _is_open(self, outage: Outage) -> bool:
        return outage.next_check_at > self._clock.now()

    def _find_outage(self) -> Outage | None:
        from airflow_delay_provider.brokers.ledger import cluster_circuits

        with self._ledger.read() as connection:
            return cluster_circuits.find_outage(connection, self._name)


def find_outage(hook: DelayHook, cluster: ClusterAddress) -> Outage | None:
    """Return a known outage that lasts; a ledger that cannot be read keeps no task from submitting."""
    try:
        return _circuit(hook, cluster).known_outage()
    except BrokerError as error:
        log.warning("Cannot read whether %s is known to be down: %s", cluster.name, error)
        return None


def wait_for_token(hook: DelayHook, cluster: ClusterAddress, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Pace submissions once more in the task: Airflow may start tasks together that were admitted one by one."""
    try:
        (at,) = _circuit(hook, cluster).take_submission_tokens(1)
    except BrokerError as error:
        log.warning("Cannot pace the submission to %s: %s", cluster.name, error)
    else:
        sleep(max(0.0, (at - hook.get_conn().clock.now()).total_seconds()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryTarget:
    """The cluster to which tickets submit, and their channel."""

    spark_conn_id: str
    #: Dotted path of the user's own check whether the cluster is up.
    check: str | None = None
    channel: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """The ticket to wait for next, and the journal position from before it was scheduled."""

    ticket: Ticket
    since: str


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    ticket: Ticket
    target: RetryTarget
    #: None means admitted.
    result: asyncio.Future[Extension | None]


class RetryAdmission(BrokerThread):
    """Admits due tickets for all triggers of one triggerer, with one check of each cluster and one write per batch."""

    interval = 60.0

    def __init__(self, conn_id: str, loop: asyncio.AbstractEventLoop, *, hold: str | None = None) -> None:
        super().__init__(conn_id, loop, hold=hold)
        self._requests: deque[_Request] = deque()

    async def admit(self, ticket: Ticket, target: RetryTarget) -> Extension | None:
        """Return None if the job may be submitted now, else the ticket that extends the wait.

        The broker has confirmed that ticket, so you can list, expedite and cancel it like the first.
        """
        request = _Request(ticket, target, self.loop.create_future())
        self._requests.append(request)
        self.poll_now()
        try:
            return await request.result
        finally:
            # A trigger that was cancelled meanwhile needs no ticket any more.
            with suppress(ValueError):
                self._requests.remove(request)

    def poll(self, hook: DelayHook) -> bool:
        batches = defaultdict[RetryTarget, list[_Request]](list)
        for request in list(self._requests):
            batches[request.target].append(request)
        for target, batch in batches.items():
            try:
                self._admit_batch(hook, target, batch)
            except (ConfigurationError, InvalidMessageError) as error:
                # It stays wrong, and must not hold up the tickets of other clusters.
                for request in batch:
                    self.call_on_loop(_set_error, request, error)
            # Only now: after an error the next round handles them again, with the same ids.
            for request in batch:
                with suppress(ValueError):
                    self._requests.remove(request)
        return bool(self._requests)

    def fail(self, error: Exception) -> None:
        for request in self._requests:
            _set_error(request, error)

    def _admit_batch(self, hook: DelayHook, target: RetryTarget, batch: Sequence[_Request]) -> None:
        broker = hook.get_conn()
        decisions = _decide(_circuit(hook, find_cluster(target.spark_conn_id, check=target.check)), batch)
        now = broker.clock.now()
        # A cluster that is down is down also when its next check has become due meanwhile.
        extended = {
            request: _extend(request.ticket, decision).accepted_by(broker.limits, now=now)
            for request, decision in decisions.items()
            if decision.down or decision.at > now
        }
        since = broker.outcomes_begin()
        if extended:
            hook.schedule([ticket.as_message(target.channel) for ticket in extended.values()])
        for request in batch:
            ticket = extended.get(request)
            self.call_on_loop(_set_result, request, None if ticket is None else Extension(ticket=ticket, since=since))


def _circuit(hook: DelayHook, cluster: ClusterAddress) -> ClusterCircuit:
    return ClusterCircuit(hook.get_ledger(), cluster, clock=hook.get_conn().clock)


def _decide(circuit: ClusterCircuit, batch: Sequence[_Request]) -> dict[_Request, AdmissionDecision]:
    """A ticket that waited for its token has it, and takes no other."""
    with_token = [request for request in batch if request.ticket.waits_for is WaitsFor.RATE_LIMIT]
    others = [request for request in batch if request.ticket.waits_for is not WaitsFor.RATE_LIMIT]
    decisions = circuit.decide(len(batch), with_token=len(with_token))
    return dict(zip([*with_token, *others], decisions, strict=True))


def _extend(ticket: Ticket, decision: AdmissionDecision) -> Ticket:
    return ticket.extended(decision.at, WaitsFor.CLUSTER if decision.down else WaitsFor.RATE_LIMIT)


def _set_result(request: _Request, result: Extension | None) -> None:
    if not request.result.done():
        request.result.set_result(result)


def _set_error(request: _Request, error: Exception) -> None:
    if not request.result.done():
        request.result.set_exception(error)


def _key_of(name: str) -> str:
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = sha256(name.encode()).hexdigest()
    return f"{name[: MAX_NAME_LENGTH - len(digest) - 1]}-{digest}"
