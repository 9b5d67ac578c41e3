"""What the ladder in RabbitMQ is meant to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.measuring import Measurement, Results
from benchmarks.rabbitmq_deliveries import SLOW
from benchmarks.rabbitmq_ways import BINARY, KOMBU, OFF, ON, RAW, STORE
from benchmarks.results import show

#: By way.
Values = Mapping[str, Sequence[float]]
LATENESS_MS = 50

_RATES = {other: f"rate: {OFF} / {other}" for other in (RAW, BINARY, KOMBU)}
_CPU = f"CPU: {OFF} / {BINARY}"


@dataclass(frozen=True, kw_only=True)
class Aim:
    """One measurement and the value that it should reach."""

    name: str
    value: float
    most: bool = False
    store: str | None = None

    def is_of(self, measurement: Measurement) -> bool:
        """Whether the measurement is the one that is meant."""
        return measurement.name == self.name and self.store in (None, measurement.store)

    def is_met_by(self, measurement: Measurement) -> bool:
        """Whether it is reached."""
        return measurement.value <= self.value if self.most else measurement.value >= self.value


AIMS = (
    Aim(name=_RATES[RAW], value=0.37),
    Aim(name=_RATES[BINARY], value=1.7),
    Aim(name=_RATES[KOMBU], value=15),
    Aim(name=_CPU, value=0.6, most=True),
    Aim(name=f"{OFF}, {SLOW}/s, p99", value=LATENESS_MS, most=True),
    Aim(name=f"{ON}, {SLOW}/s, p99", value=LATENESS_MS, most=True),
)


def add_ratios(results: Results, *, rates: Values, cpu: Values) -> None:
    """Add the ratios that are aimed at, each with its spread over the repeats."""
    for other, name in _RATES.items():
        results.add(STORE, name, _ratios(rates, other), "times")
    results.add(STORE, _CPU, _ratios(cpu, BINARY), "times")


def table(measurements: Sequence[Measurement]) -> str:
    """Return all aims and what was measured."""
    lines = ["| queues | measurement | aim | median | min - max | unit | met |", "|---|---|---:|---:|---:|---|---|"]
    for m in measurements:
        for aim in AIMS:
            if aim.is_of(m):
                wanted = f"{'<=' if aim.most else '>='} {aim.value:g}"
                met = "yes" if aim.is_met_by(m) else "**no**"
                spread = f"{_fine(m.min)} - {_fine(m.max)}"
                lines.append(f"| {m.store} | {m.name} | {wanted} | {_fine(m.value)} | {spread} | {m.unit} | {met} |")
    return "\n".join(lines)


def _ratios(values: Values, other: str) -> list[float]:
    return [mine / its for mine, its in zip(values[OFF], values[other], strict=True)]


def _fine(value: float) -> str:
    return f"{value:.2f}" if value < 10 else show(value)
