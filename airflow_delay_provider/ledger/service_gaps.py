"""Why messages that wait would stay where they are: no dispatcher, or one that cannot do its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_delay_provider.ledger.heartbeats import DispatcherRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceGap:
    """Nobody does what is needed."""

    problem: str
    #: No dispatcher is there at all, so that starting one helps.
    is_absence: bool

    def describe(self, command: str) -> str:
        """Return the problem, with what to do about it."""
        return f"{self.problem}; start one with `{command}`" if self.is_absence else self.problem


def find_gap(dispatchers: Sequence[DispatcherRecord], *, destination: str | None = None) -> ServiceGap | None:
    """Say why messages that the ledger holds for ``destination``, None is its own channels, would stay."""
    if destination is None:
        return _find(dispatchers, "no dispatcher", ("dispatch_due",))
    return _find(dispatchers, "no dispatcher", ("serve_destinations", f"dispatch_away:{destination}"))


def find_climb_gap(dispatchers: Sequence[DispatcherRecord], conn_id: str) -> ServiceGap | None:
    """Say why messages on the ladder of a connection would stay; dispatchers of other ledgers are not known here."""
    serving = [each for each in dispatchers if conn_id in each.climbs]
    return _find(serving, f"no dispatcher that serves the ladder of {conn_id!r}", (f"climb_ladder:{conn_id}",))


def _find(dispatchers: Sequence[DispatcherRecord], nobody: str, loops: tuple[str, ...]) -> ServiceGap | None:
    alive = [each for each in dispatchers if each.is_alive]
    if not alive:
        return ServiceGap(problem=_describe_absence(dispatchers, nobody), is_absence=True)
    problems = [each.problem_of(*loops) for each in alive]
    if None in problems:
        return None
    return ServiceGap(problem=f"dispatcher {alive[0].owner} runs, but {problems[0]}", is_absence=False)


def _describe_absence(dispatchers: Sequence[DispatcherRecord], nobody: str) -> str:
    if not dispatchers:
        return f"{nobody} has ever been seen in this ledger"
    last = dispatchers[0]
    how = "was stopped then" if last.stopped_at is not None else "sent its last heartbeat then"
    return f"{nobody} has been seen since {last.seen_at:%Y-%m-%d %H:%M:%S} UTC ({last.owner} {how})"
