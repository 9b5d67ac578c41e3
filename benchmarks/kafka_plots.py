"""The results of the Kafka benchmark as pictures."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.kafka_aims import LATENESS_MS
from benchmarks.kafka_node import STORE
from benchmarks.kafka_report import DESIGNS
from benchmarks.kafka_writes import DELAYS_MS
from benchmarks.measuring import Measurement, Results
from benchmarks.plots import AIM_COLOR, BARE_COLOR, finish, panels
from benchmarks.results import show

OURS_COLOR = "#0b7285"
DESIGN_COLORS = dict(zip(DESIGNS, ("#99e9f2", "#0b7285", "#748ffc", "#364fc7", BARE_COLOR), strict=True))
STYLES = (("-", "#0b7285"), (":", "#0b7285"), ("-", "#364fc7"), (":", "#364fc7"))


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw rates, CPU time, writes and lateness, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "kafka_rates.png": _draw_bars(results, "messages/s", "messages a second"),
        "kafka_cpu.png": _draw_bars(results, "us/message", "CPU time, microseconds a message"),
        "kafka_writes.png": _draw_writes(results),
        "kafka_lateness.png": _draw_lateness(results),
    }
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in pictures]


def _draw_bars(results: Results, unit: str, title: str) -> Figure:
    measured = [m for m in results.measurements if m.unit == unit][::-1]
    figure, (axis,) = panels(1, height=1.2 + 0.36 * len(measured), sharey=False)
    spread = [[m.value - m.min for m in measured], [m.max - m.value for m in measured]]
    colors = [BARE_COLOR if m.name.startswith("raw") else OURS_COLOR for m in measured]
    names = [m.name if m.store == STORE else f"{m.name}, {m.store}" for m in measured]
    axis.barh(names, [m.value for m in measured], xerr=spread, color=colors, error_kw={"lw": 1, "capsize": 2})
    axis.margins(x=0.25)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    for position, m in enumerate(measured):
        axis.annotate(_label(m), (m.max, position), xytext=(5, 0), textcoords="offset points", va="center")
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
        places = [place + (number - (len(DESIGNS) - 1) / 2) * width for place in range(len(DELAYS_MS))]
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
        ordered = sorted(max(value, 0.5) for value in values)
        shares = [(position + 1) / len(ordered) * 100 for position in range(len(ordered))]
        p99 = results.get(STORE, f"{name[1]}, p99")
        label = f"{name[1]}: p99 {show(p99.value)} ms" if p99 else name[1]
        axis.plot(ordered, shares, style, color=color, label=label)
    axis.axvline(LATENESS_MS, color=AIM_COLOR, lw=1, label=f"aim: p99 within {LATENESS_MS} ms for a consumer")
    axis.axhline(99, color=AIM_COLOR, lw=1, ls=":")
    axis.set_xscale("log")
    axis.set_xticks([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], minor=False)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlim(0.5, max(200, *(max(values) for values in results.samples.values())) * 1.2)
    axis.set_xlabel("lateness, ms (below 0.5 drawn as 0.5)")
    axis.set_ylabel("messages at most so late, %")
    axis.legend(loc="lower right", fontsize="small")
    finish(axis, "Lateness at a steady rate, delays of 3 to 10 s", grid="both")
    return figure
