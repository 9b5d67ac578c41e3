"""Measurements, their spread over repeats, and checks of their validity."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median

import psutil


class ServerProcess:
    """The process of a server on this machine, and the processor time that it uses."""

    def __init__(self, name: str, port: int, variable: str) -> None:
        # The process that listens is the whole server: its helpers use next to nothing.
        pids = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
        if None in pids or len(pids) != 1:
            raise RuntimeError(f"no {name} of this user listens on port {port} of this machine: unset {variable}")
        self.process = psutil.Process(pids.pop())

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the server has used since it began."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def idle_share(self, seconds: float) -> float:
        """Return how much of one core the server uses while it is idle."""
        before = self.cpu_seconds
        time.sleep(seconds)
        return (self.cpu_seconds - before) / seconds


class MismatchError(AssertionError):
    """A benchmark did not do what it was timed for."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of the results."""

    date: str
    #: Where messages are kept: a database, or a type of queue.
    store: str
    name: str
    #: The median of the repeats.
    value: float
    unit: str
    #: The measurement it is compared with, and the median of the ratios of the repeats that ran side by side.
    ratio_to: str = ""
    ratio: float | None = None
    min: float
    max: float
    repeats: int


@dataclass
class Results:
    """The measurements of one run."""

    measurements: list[Measurement] = field(default_factory=list)
    #: Every single value behind a few of them, for the plots.
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def add(
        self,
        store: str,
        name: str,
        values: Sequence[float],
        unit: str,
        *,
        ratio_to: str = "",
        base: Sequence[float] = (),
    ) -> None:
        """Add the values of all repeats of one measurement; ``base`` are those of the measurement ``ratio_to``."""
        ratios = [value / other for value, other in zip(values, base, strict=bool(base)) if other]
        self.measurements.append(
            Measurement(
                date=self.date,
                store=store,
                name=name,
                value=median(values),
                unit=unit,
                ratio_to=ratio_to,
                ratio=median(ratios) if ratios else None,
                min=min(values),
                max=max(values),
                repeats=len(values),
            )
        )

    def get(self, store: str, name: str) -> Measurement | None:
        """Return one measurement, None when it was not made."""
        return next((m for m in self.measurements if (m.store, m.name) == (store, name)), None)


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"{datetime.now(UTC):%H:%M:%S}  {text}", flush=True)


def expect(what: str, found: object, wanted: object) -> None:
    """Stop the run when a count is wrong: a fast wrong answer is no measurement."""
    if found != wanted:
        raise MismatchError(f"{what}: found {found}, wanted {wanted}")


def rate(n: int, work: Callable[[], object]) -> float:
    """Return how many of ``n`` things a second ``work`` does."""
    begin = time.perf_counter()
    work()
    return n / (time.perf_counter() - begin)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
