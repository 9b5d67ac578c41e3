"""The gate before a Spark cluster: nobody submits while it is down, and not all at once when it is back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.spark.probes import ClusterAddress, probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_delay_provider.domain.clock import Clock
    from airflow_delay_provider.ledger.database import Ledger
    from airflow_delay_provider.ledger.gates import Outage

#: Between two looks at a cluster that is down, whoever waits for it.
LOOKS = Backoff(initial=timedelta(seconds=10), cap=timedelta(seconds=60), floor=timedelta(seconds=5))
#: Of the key in the ledger.
MAX_NAME_LENGTH = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """How many failed jobs are submitted again to one cluster."""

    per_second: float = 1.0
    burst: int = 5

    def __post_init__(self) -> None:
        if not 0.001 <= self.per_second <= 1000:
            raise ConfigurationError(
                f"[delay] spark_submissions_per_second: {self.per_second} is not a rate; use 0.001 to 1000"
            )
        if self.burst < 1:
            raise ConfigurationError(f"[delay] spark_submission_burst: {self.burst} is no number; use 1 or more")

    @classmethod
    def from_airflow(cls) -> Bucket:
        """Return what section delay of Airflow's configuration says."""
        from airflow.sdk.configuration import conf

        return cls(
            per_second=conf.getfloat("delay", "spark_submissions_per_second", fallback=1.0),
            burst=conf.getint("delay", "spark_submission_burst", fallback=5),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """When a submission may begin or, while the cluster is down, when to ask again."""

    at: datetime
    #: Why the cluster counts as down; empty when it is up.
    down: str = ""


class ClusterGate:
    """Asks for all tasks of all processes that use one ledger.

    An outage that one has seen holds for all, who look again together and ever more rarely. Turns are given out by a
    token bucket in the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        cluster: ClusterAddress,
        *,
        bucket: Bucket | None = None,
        clock: Clock | None = None,
        random_source: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._name = _key_of(cluster.name)
        self._bucket = bucket or Bucket.from_airflow()
        self._clock = clock or SystemClock()
        self._random = random_source

    def known_outage(self) -> Outage | None:
        """Return an outage that somebody has seen; whoever asks when the next look is due looks."""
        outage = self._find_outage()
        if outage is None or self._is_to_rest(outage):
            return outage
        return None if self._look(outage) is None else self._find_outage()

    def ask(self, n: int, *, had_turn: int = 0) -> list[Answer]:
        """Look whether the cluster is up, once for ``n`` submissions, and give each its turn.

        The first ``had_turn`` of them have had theirs.
        """
        if not n:
            return []
        known = self._find_outage()
        if known is not None and self._is_to_rest(known):
            reason = f"{self._cluster.name} was down when last looked at, since {known.since:%H:%M:%S} UTC"
            return [Answer(at=known.next_look_at, down=reason)] * n
        down = self._look(known)
        if down is not None:
            return [down] * n
        turns = self.take_turns(n - had_turn) if n > had_turn else []
        return [Answer(at=at) for at in [self._clock.now()] * had_turn + turns]

    def take_turns(self, n: int) -> list[datetime]:
        """Return ``n`` moments, from now on, at which waiting tasks may come back."""
        return self._take_turns(self._name, n)

    def submission_turns(self, n: int) -> list[datetime]:
        """Return ``n`` moments, from now on, at which tasks that came back may submit: nearly always now."""
        return self._take_turns(_key_of(f"{self._cluster.name}#submit"), n)

    def _take_turns(self, name: str, n: int) -> list[datetime]:
        from airflow_delay_provider.ledger import gates

        every, now, burst = timedelta(seconds=1 / self._bucket.per_second), self._clock.now(), self._bucket.burst
        return self._ledger.transact(
            lambda connection: gates.take_turns(connection, name, n, now=now, every=every, burst=burst)
        )

    def _look(self, known: Outage | None) -> Answer | None:
        """Look at the cluster and note what is seen; return nothing when it is up."""
        seen = probe(self._cluster)
        if not seen.is_up:
            return self._note_down(known, seen.reason)
        if known is not None:
            self._note_up()
        return None

    def _note_down(self, known: Outage | None, reason: str) -> Answer:
        """What was known before the look: those who looked at the same time count as one."""
        from airflow_delay_provider.ledger import gates

        now = self._clock.now()
        pause = LOOKS.delay(1 if known is None else known.looks + 1, self._random)
        self._ledger.transact(
            lambda connection: gates.note_down(connection, self._name, known=known, now=now, pause=pause)
        )
        return Answer(at=now + pause, down=reason)

    def _note_up(self) -> None:
        from airflow_delay_provider.ledger import gates

        self._ledger.transact(lambda connection: gates.note_up(connection, self._name))

    def _is_to_rest(self, outage: Outage) -> bool:
        return outage.next_look_at > self._clock.now()

    def _find_outage(self) -> Outage | None:
        from airflow_delay_provider.ledger import gates

        with self._ledger.read() as connection:
            return gates.find_outage(connection, self._name)


def _key_of(name: str) -> str:
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = sha256(name.encode()).hexdigest()
    return f"{name[: MAX_NAME_LENGTH - len(digest) - 1]}-{digest}"
