"""The aims of the RabbitMQ benchmark, whether they are met, and its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measurement import Measurement, Results
from benchmarks.plots import BARE_COLOR, draw_bars, draw_lateness, finish, finish_lateness, panels, save
from benchmarks.rabbitmq_measure import SLOW
from benchmarks.rabbitmq_methods import BINARY, KOMBU, OFF, ON, ONE, RAW, STORE
from benchmarks.results import show

#: By method.
Values = Mapping[str, Sequence[float]]
LATENESS_MS = 50

#: Two methods that are compared; the journal is on by default, so the aims are with it.
_RATES = {
    (mine, other): f"rate: {mine} / {other}" for mine, other in ((ON, RAW), (ON, BINARY), (ON, KOMBU), (ONE, KOMBU))
}
_CPU = {(ON, BINARY): f"CPU: {ON} / {BINARY}"}


@dataclass(frozen=True, kw_only=True)
class Aim:
    """One measurement and the value that it should reach."""

    name: str
    value: float
    most: bool = False
    store: str | None = None

    def is_of(self, measurement: Measurement) -> bool:
        """Whether this is its measurement."""
        return measurement.name == self.name and self.store in (None, measurement.store)

    def is_met_by(self, measurement: Measurement) -> bool:
        """Whether it is reached."""
        return measurement.value <= self.value if self.most else measurement.value >= self.value


AIMS = (
    Aim(name=_RATES[ON, RAW], value=0.37),
    Aim(name=_RATES[ON, BINARY], value=1.7),
    Aim(name=_RATES[ON, KOMBU], value=15),
    # Both do the same work: one message a call, each confirmed before the next one.
    Aim(name=_RATES[ONE, KOMBU], value=2),
    Aim(name=_CPU[ON, BINARY], value=0.6, most=True),
    Aim(name=f"{OFF}, {SLOW}/s, p99", value=LATENESS_MS, most=True),
    Aim(name=f"{ON}, {SLOW}/s, p99", value=LATENESS_MS, most=True),
)


def add_ratios(results: Results, *, rates: Values, cpu: Values) -> None:
    """Add the ratios that are aimed at, each with its spread over the repeats."""
    for values, names in ((rates, _RATES), (cpu, _CPU)):
        for (mine, other), name in names.items():
            ratios = [ours / its for ours, its in zip(values[mine], values[other], strict=True)]
            results.add(STORE, name, ratios, "times")


def table(measurements: Sequence[Measurement]) -> str:
    """Return all aims and their measurements."""
    lines = ["| queues | measurement | aim | median | min - max | unit | met |", "|---|---|---:|---:|---:|---|---|"]
    for m in measurements:
        for aim in AIMS:
            if aim.is_of(m):
                wanted = f"{'<=' if aim.most else '>='} {aim.value:g}"
                met = "yes" if aim.is_met_by(m) else "**no**"
                spread = f"{_fine(m.min)} - {_fine(m.max)}"
                lines.append(f"| {m.store} | {m.name} | {wanted} | {_fine(m.value)} | {spread} | {m.unit} | {met} |")
    return "\n".join(lines)


def _fine(value: float) -> str:
    return f"{value:.2f}" if value < 10 else show(value)


OURS_COLOR = "#364fc7"
STYLES = (("-", "#0b7285"), ("-", "#364fc7"), ("--", "#868e96"), (":", "#364fc7"))


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw rates, CPU time and lateness, and return the files."""
    pictures = {
        "rabbitmq_rates.png": _draw_bars(results, "messages/s", "messages published a second"),
        "rabbitmq_cpu.png": _draw_bars(results, "us/message", "broker CPU, microseconds a message"),
        "rabbitmq_lateness.png": _draw_lateness(results),
    }
    return save(pictures, folder)


def _draw_bars(results: Results, unit: str, title: str) -> Figure:
    measured = [m for m in results.measurements if m.unit == unit][::-1]
    figure, (axis,) = panels(1, height=1.2 + 0.36 * len(measured), sharey=True)
    colors = [OURS_COLOR if m.name.endswith((OFF, ON, ONE)) else BARE_COLOR for m in measured]
    labels = [show(m.value) + ("" if m.ratio is None else f"   x {m.ratio:.2f}") for m in measured]
    draw_bars(axis, measured, names=[m.name for m in measured], colors=colors, labels=labels)
    axis.margins(x=0.25)
    finish(axis, f"{STORE} queues: {title}", grid="x")
    base = next((m.ratio_to for m in measured if m.ratio_to), "")
    figure.suptitle(f"Median, whiskers min to max; x is the ratio to: {base}")
    return figure


def _draw_lateness(results: Results) -> Figure:
    figure, (axis,) = panels(1, height=4.2, sharey=True)
    for (_, name), (style, color) in zip(results.samples, STYLES, strict=True):
        p99 = results.get(STORE, f"{name}, p99")
        label = f"{name}: p99 {show(p99.value)} ms" if p99 else name
        draw_lateness(axis, results.samples[(STORE, name)], style, color=color, label=label)
    aim, limits = f"{LATENESS_MS} ms at {SLOW}/s", (1, max(100, *map(max, results.samples.values())) * 1.2)
    finish_lateness(axis, f"{STORE} queues", aim_ms=LATENESS_MS, aim=aim, limits_ms=limits)
    axis.set_xlabel("lateness beyond the tick, ms (below 0.5 drawn as 0.5)")
    axis.set_ylabel("messages at most so late, %")
    figure.suptitle("Lateness at a consumer beyond the due time rounded up to the tick of 1 s")
    return figure
