"""The results as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import lateness
from benchmarks.measurement import Measurement, Results
from benchmarks.results import show

COLORS = {"sqlite": "#0b7285", "postgresql": "#364fc7"}
BARE_COLOR = "#adb5bd"
AIM_COLOR = "#c92a2a"
LATENESS_AIM_MS = 50


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw rates, lateness and flatness, and return the files."""
    databases = list(dict.fromkeys(m.store for m in results.measurements))
    pictures = {
        "ledger_rates.png": _draw_rates(results, databases),
        "ledger_lateness.png": _draw_lateness(results, databases),
        "ledger_flat.png": _draw_flat(results, databases),
    }
    return save(pictures, folder)


def _draw_rates(results: Results, databases: Sequence[str]) -> Figure:
    def rates(database: str) -> list[Measurement]:
        return [
            m
            for m in results.measurements
            if m.store == database and m.unit in ("messages/s", "entries/s") and m.name != "steady scheduling"
        ]

    most = max(len(rates(database)) for database in databases)
    figure, axes = panels(len(databases), height=1.2 + 0.36 * most, sharey=True)
    for axis, database in zip(axes, databases, strict=True):
        bars = rates(database)[::-1]
        colors = [BARE_COLOR if m.name.startswith("bare") else COLORS[database] for m in bars]
        axis.set_xscale("log")
        axis.set_xlim(30, 1_000_000)
        draw_bars(axis, bars, names=[m.name for m in bars], colors=colors, labels=[show(m.value) for m in bars])
        finish(axis, f"{database}: messages (or entries) a second", grid="x")
    figure.suptitle("Rates: median, whiskers min to max; grey is bare SQL through the driver")
    return figure


def _draw_lateness(results: Results, databases: Sequence[str]) -> Figure:
    figure, axes = panels(len(databases), height=4.2, sharey=True)
    for axis, database in zip(axes, databases, strict=True):
        for name, style in ((lateness.BY_LEDGER, "-"), (lateness.BY_CONSUMER, "--")):
            p99 = results.get(database, f"{name}, p99")
            label = f"{name.removeprefix('lateness ')}: p99 {show(p99.value)} ms" if p99 else name
            draw_lateness(axis, results.samples[(database, name)], style, color=COLORS[database], label=label)
        limits = (0.5, max(200, *map(max, results.samples.values())) * 1.2)
        finish_lateness(axis, database, aim=f"{LATENESS_AIM_MS} ms", aim_ms=LATENESS_AIM_MS, limits_ms=limits)
        axis.set_xlabel("lateness, ms (below 0.5 drawn as 0.5)")
    axes[0].set_ylabel("messages at most so late, %")
    figure.suptitle(f"Lateness at {lateness.RATE} messages/s, delays {lateness.DELAY_SECONDS[0]} to 4 s")
    return figure


def _draw_flat(results: Results, databases: Sequence[str]) -> Figure:
    def pairs(database: str) -> list[tuple[Measurement, Measurement]]:
        large = [m for m in results.measurements if m.store == database and m.unit == "us" and m.ratio_to]
        return [(small, m) for m in large if (small := results.get(database, m.ratio_to))][::-1]

    most = max(len(pairs(database)) for database in databases)
    figure, axes = panels(len(databases), height=1.6 + 0.42 * most, sharey=True)
    for axis, database in zip(axes, databases, strict=True):
        names = []
        for position, (small, large) in enumerate(pairs(database)):
            name, _, size = small.name.rpartition(" at ")
            names.append(name)
            labels = (size, large.name.rpartition(" at ")[2]) if position == 0 else (None, None)
            axis.plot([small.value, large.value], [position, position], color=BARE_COLOR, lw=1, zorder=1)
            axis.scatter([small.value], [position], s=70, facecolors="none", edgecolors="black", label=labels[0])
            axis.scatter([large.value], [position], s=28, color=COLORS[database], label=labels[1])
            axis.annotate(
                f"x {large.ratio:.2f}",
                (max(small.value, large.value), position),
                xytext=(9, 0),
                textcoords="offset points",
                va="center",
            )
        axis.set_yticks(range(len(names)), names)
        axis.set_xscale("log")
        axis.set_xlim(50, 50_000)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("microseconds a call")
        axis.legend(loc="lower right", fontsize="small")
        finish(axis, database, grid="x")
    figure.suptitle("What one look at the ledger costs, and how many times more in the large one")
    return figure


def panels(n: int, *, height: float, sharey: bool) -> tuple[Figure, list[Axes]]:
    """Return a picture of ``n`` panels side by side."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    # Without pyplot: it needs no display and changes no global state.
    figure = Figure(figsize=(6.2 * max(n, 1) + 1.5, height), layout="constrained")
    axes = figure.subplots(1, n, sharey=sharey, squeeze=False)
    return figure, list(axes[0])


def draw_bars(
    axis: Axes, measured: Sequence[Measurement], *, names: Sequence[str], colors: Sequence[str], labels: Iterable[str]
) -> None:
    """Draw measurements with their spread, from the bottom to the top."""
    spread = [[m.value - m.min for m in measured], [m.max - m.value for m in measured]]
    axis.barh(names, [m.value for m in measured], xerr=spread, color=colors, error_kw={"lw": 1, "capsize": 2})
    axis.xaxis.set_major_formatter("{x:,.0f}")
    for position, (m, label) in enumerate(zip(measured, labels, strict=True)):
        axis.annotate(label, (m.max, position), xytext=(5, 0), textcoords="offset points", va="center")


def draw_lateness(axis: Axes, values_ms: Sequence[float], style: str, *, color: str, label: str) -> None:
    """Draw which share of the messages was at most so late."""
    ordered = sorted(max(value, 0.5) for value in values_ms)
    shares = [(position + 1) / len(ordered) * 100 for position in range(len(ordered))]
    axis.plot(ordered, shares, style, color=color, label=label)


def finish_lateness(axis: Axes, title: str, *, aim_ms: float, aim: str, limits_ms: tuple[float, float]) -> None:
    """Give a panel of lateness its aim, its scale, its legend and its title."""
    axis.axvline(aim_ms, color=AIM_COLOR, lw=1, label=f"aim: p99 within {aim}")
    axis.axhline(99, color=AIM_COLOR, lw=1, ls=":")
    axis.set_xscale("log")
    axis.set_xticks([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], minor=False)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_xlim(limits_ms)
    axis.legend(loc="lower right", fontsize="small")
    finish(axis, title, grid="both")


def save(pictures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write pictures by their file names, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in pictures]


def finish(axis: Axes, title: str, *, grid: str) -> None:
    """Give a panel its title and its grid."""
    axis.set_title(title, fontsize=10)
    axis.grid(axis=grid, which="major", alpha=0.3)
    axis.set_axisbelow(True)
