"""What the ladder in Kafka is meant to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks import kafka_dispatch, kafka_schedule
from benchmarks.kafka_lateness import RATES, SEEN
from benchmarks.kafka_node import STORE
from benchmarks.measuring import Measurement, Results
from benchmarks.rabbitmq_aims import Aim
from benchmarks.results import show

#: By name.
Rates = Mapping[str, Sequence[float]]
LATENESS_MS = 100

SCHEDULE = f"rate: {kafka_schedule.OURS} / {kafka_schedule.RAW}"
COMPOSED = f"rate: {kafka_schedule.COMPOSED} / {kafka_schedule.RAW}"
DISPATCH = f"rate: {kafka_dispatch.OURS} / {kafka_dispatch.RAW}"
TWO = f"rate: {kafka_dispatch.TWO} / {kafka_dispatch.OURS}"

AIMS = (
    Aim(name=SCHEDULE, value=0.8),
    Aim(name=DISPATCH, value=0.3, store=STORE),
    *(Aim(name=f"{rate}/s, {SEEN}, p99", value=LATENESS_MS, most=True) for rate in RATES),
)


def add_ratios(results: Results, *, schedule: Rates, dispatch: Rates) -> None:
    """Add the ratios that are aimed at, each with its spread over the repeats."""
    _add(results, SCHEDULE, schedule, kafka_schedule.OURS, kafka_schedule.RAW)
    _add(results, COMPOSED, schedule, kafka_schedule.COMPOSED, kafka_schedule.RAW)
    _add(results, DISPATCH, dispatch, kafka_dispatch.OURS, kafka_dispatch.RAW)
    _add(results, TWO, dispatch, kafka_dispatch.TWO, kafka_dispatch.OURS)


def table(measurements: Sequence[Measurement]) -> str:
    """Return all aims and what was measured."""
    lines = ["| measurement | aim | median | min - max | unit | met |", "|---|---:|---:|---:|---|---|"]
    for aim in AIMS:
        for m in filter(aim.is_of, measurements):
            wanted = f"{'<=' if aim.most else '>='} {aim.value:g}"
            met = "yes" if aim.is_met_by(m) else "**no**"
            lines.append(
                f"| {m.name} | {wanted} | {_fine(m.value)} | {_fine(m.min)} - {_fine(m.max)} | {m.unit} | {met} |"
            )
    return "\n".join(lines)


def _add(results: Results, name: str, rates: Rates, mine: str, other: str) -> None:
    ratios = [ours / its for ours, its in zip(rates[mine], rates[other], strict=True)]
    results.add(STORE, name, ratios, "times")


def _fine(value: float) -> str:
    return f"{value:.2f}" if value < 10 else show(value)
