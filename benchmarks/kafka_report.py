"""The results of the Kafka benchmark: aims, the tables in ``docs/performance.md``, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import kafka_dispatch, kafka_schedule
from benchmarks.kafka_node import STORE
from benchmarks.kafka_realtime import RATES, SEEN
from benchmarks.kafka_writes import BUCKETS, DELAYS_MS, RADIXES
from benchmarks.measurement import Measurement, Results
from benchmarks.plots import BARE_COLOR, draw_bars, draw_lateness, finish, finish_lateness, panels, save
from benchmarks.rabbitmq_report import Aim
from benchmarks.results import machine_line, show

#: By name.
Rates = Mapping[str, Sequence[float]]
LATENESS_MS = 100
SCHEDULE = f"rate: {kafka_schedule.OURS} / {kafka_schedule.RAW}"
SAME = f"rate: {kafka_schedule.OURS} / {kafka_schedule.RAW_SAME}"
COMPOSED = f"rate: {kafka_schedule.COMPOSED} / {kafka_schedule.RAW}"
DISPATCH = f"rate: {kafka_dispatch.OURS} / {kafka_dispatch.RAW}"
TWO = f"rate: {kafka_dispatch.TWO} / {kafka_dispatch.OURS}"
AIMS = (
    Aim(name=SCHEDULE, value=0.8),
    Aim(name=SAME, value=0.5),
    Aim(name=DISPATCH, value=0.3, store=STORE),
    *(Aim(name=f"{rate}/s, {SEEN}, p99", value=LATENESS_MS, most=True) for rate in RATES),
)


def add_ratios(results: Results, *, schedule: Rates, dispatch: Rates) -> None:
    """Add the ratios that are aimed at, each with its spread over the repeats."""
    _add_ratio(results, SCHEDULE, schedule, kafka_schedule.OURS, kafka_schedule.RAW)
    _add_ratio(results, SAME, schedule, kafka_schedule.OURS, kafka_schedule.RAW_SAME)
    _add_ratio(results, COMPOSED, schedule, kafka_schedule.COMPOSED, kafka_schedule.RAW)
    _add_ratio(results, DISPATCH, dispatch, kafka_dispatch.OURS, kafka_dispatch.RAW)
    _add_ratio(results, TWO, dispatch, kafka_dispatch.TWO, kafka_dispatch.OURS)


def aims_table(measurements: Sequence[Measurement]) -> str:
    """Return all aims and their measurements."""
    lines = ["| measurement | aim | median | min - max | unit | met |", "|---|---:|---:|---:|---|---|"]
    for aim in AIMS:
        for m in filter(aim.is_of, measurements):
            wanted = f"{'<=' if aim.most else '>='} {aim.value:g}"
            met = "yes" if aim.is_met_by(m) else "**no**"
            lines.append(
                f"| {m.name} | {wanted} | {_fine(m.value)} | {_fine(m.min)} - {_fine(m.max)} | {m.unit} | {met} |"
            )
    return "\n".join(lines)


def _add_ratio(results: Results, name: str, rates: Rates, mine: str, other: str) -> None:
    ratios = [ours / its for ours, its in zip(rates[mine], rates[other], strict=True)]
    results.add(STORE, name, ratios, "times")


def _fine(value: float) -> str:
    return f"{value:.2f}" if value < 10 else show(value)


DESIGNS = (*(f"radix {radix}" for radix in RADIXES), BUCKETS)


def kafka_tables(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return them by their names."""
    return {
        "kafka machine": machine_line(measurements, machine, _software(machine)),
        "kafka aims": aims_table(measurements),
        "kafka rates": _table(measurements, lambda m: m.unit in ("messages/s", "moves/s")),
        "kafka cpu": _table(measurements, lambda m: m.unit == "us/message"),
        "kafka choice": choice(measurements),
        "kafka lateness": _table(measurements, lambda m: m.name.split(",")[0].endswith("/s")),
        "kafka restart": _table(measurements, lambda m: m.name.startswith("restart")),
    }


def choice(measurements: Sequence[Measurement]) -> str:
    """Return all that differs between the radixes, and the buckets of the seed, side by side."""

    def cell(design: str, name: str, *, most: bool = False) -> str:
        found = {m.name: m for m in measurements if m.store == design}
        if name not in found:
            return ""
        text = f"{found[name].value:.1f}" if found[name].unit == "writes/message" else show(found[name].value)
        return f"{text} / {found[f'{name}, most'].value:.0f}" if most else text

    rows = [
        *(
            (f"writes for {name}: mean / most", [cell(each, f"writes counted, {name}", most=True) for each in DESIGNS])
            for name in DELAYS_MS
        ),
        *((f"{what}", [cell(each, name) for each in DESIGNS]) for what, name in _ROWS.items()),
    ]
    lines = [f"| | {' | '.join(DESIGNS)} |", f"|---|{'---:|' * len(DESIGNS)}"]
    return "\n".join([*lines, *(f"| {what} | {' | '.join(cells)} |" for what, cells in rows)])


_ROWS = {
    "topics in which messages wait": "rungs",
    "topics of the ladder": "topics",
    "1 h: writes of a message": f"{kafka_dispatch.OURS}: writes",
    "1 h: CPU of the broker, us a message": f"{kafka_dispatch.OURS}: CPU of the broker",
    "1 h: CPU of the dispatcher, us a message": f"{kafka_dispatch.OURS}: CPU of dispatchers",
    "1 h: messages a second": kafka_dispatch.OURS,
    "idle: CPU of the broker, % of a core": "idle, CPU of the broker",
    "idle: CPU of the dispatcher, % of a core": "idle, CPU of the dispatcher",
}


def _software(machine: Mapping[str, Any]) -> str:
    return (
        f"Kafka {machine['kafka']} (one node, idle: {machine['idle_cpu_percent']} % of a core),"
        f" confluent-kafka {machine['confluent-kafka']}"
    )


def _table(measurements: Sequence[Measurement], wanted: Callable[[Measurement], bool]) -> str:
    lines = ["| ladder | measurement | median | min - max | unit | ratio | to |", "|---|---|---:|---:|---|---:|---|"]
    for m in filter(wanted, measurements):
        ratio = "" if m.ratio is None else f"{m.ratio:.2f}"
        spread = "" if m.repeats == 1 else f"{show(m.min)} - {show(m.max)}"
        lines.append(f"| {m.store} | {m.name} | {show(m.value)} | {spread} | {m.unit} | {ratio} | {m.ratio_to} |")
    return "\n".join(lines)


OURS_COLOR = "#0b7285"
DESIGN_COLORS = dict(zip(DESIGNS, ("#99e9f2", "#0b7285", "#748ffc", "#364fc7", BARE_COLOR), strict=True))
STYLES = (("-", "#0b7285"), (":", "#0b7285"), ("-", "#364fc7"), (":", "#364fc7"))


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw rates, CPU time, writes and lateness, and return the files."""
    pictures = {
        "kafka_rates.png": _draw_bars(results, "messages/s", "messages a second"),
        "kafka_cpu.png": _draw_bars(results, "us/message", "CPU time, microseconds a message"),
        "kafka_writes.png": _draw_writes(results),
        "kafka_lateness.png": _draw_lateness(results),
    }
    return save(pictures, folder)


def _draw_bars(results: Results, unit: str, title: str) -> Figure:
    measured = [m for m in results.measurements if m.unit == unit][::-1]
    figure, (axis,) = panels(1, height=1.2 + 0.36 * len(measured), sharey=False)
    colors = [BARE_COLOR if m.name.startswith("raw") else OURS_COLOR for m in measured]
    names = [m.name if m.store == STORE else f"{m.name}, {m.store}" for m in measured]
    draw_bars(axis, measured, names=names, colors=colors, labels=map(_label, measured))
    axis.margins(x=0.25)
    finish(axis, f"{title}; whiskers min to max", grid="x")
    return figure


def _label(m: Measurement) -> str:
    return show(m.value) + ("" if m.ratio is None else f"   x {m.ratio:.2f} of {m.ratio_to}")


def _draw_writes(results: Results) -> Figure:
    figure, (axis,) = panels(1, height=3.8, sharey=False)
    width = 0.8 / len(DESIGNS)
    for number, design in enumerate(DESIGNS):
        found = [results.get(design, f"writes counted, {name}") for name in DELAYS_MS]
        rungs = results.get(design, "rungs")
        places = [position + (number - (len(DESIGNS) - 1) / 2) * width for position in range(len(DELAYS_MS))]
        label = f"{design}: {rungs.value:.0f} topics to wait in" if rungs else design
        values = [m.value if m else 0.0 for m in found]
        bars = axis.bar(places, values, width * 0.92, color=DESIGN_COLORS[design], label=label)
        axis.bar_label(bars, fmt="{:.1f}", fontsize=7)
    axis.set_xticks(range(len(DELAYS_MS)), list(DELAYS_MS))
    axis.set_xlabel("delay, and half more or less")
    axis.legend(fontsize="small")
    finish(axis, "Writes of a message after the sender's own, mean; buckets are simulated", grid="y")
    return figure


def _draw_lateness(results: Results) -> Figure:
    figure, (axis,) = panels(1, height=4.2, sharey=False)
    for (name, values), (style, color) in zip(results.samples.items(), STYLES, strict=True):
        p99 = results.get(STORE, f"{name[1]}, p99")
        label = f"{name[1]}: p99 {show(p99.value)} ms" if p99 else name[1]
        draw_lateness(axis, values, style, color=color, label=label)
    title, aim = "Lateness at a steady rate, delays of 3 to 10 s", f"{LATENESS_MS} ms for a consumer"
    limits = (0.5, max(200, *map(max, results.samples.values())) * 1.2)
    finish_lateness(axis, title, aim_ms=LATENESS_MS, aim=aim, limits_ms=limits)
    axis.set_xlabel("lateness, ms (below 0.5 drawn as 0.5)")
    axis.set_ylabel("messages at most so late, %")
    return figure
