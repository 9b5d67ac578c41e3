"""The results of the streaming benchmark: the tables in ``docs/performance.md``, and a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.measurement import Measurement, Results
from benchmarks.plots import finish, panels, save
from benchmarks.results import machine_line, show

_RATE = re.compile(r"(\d+)/s, (.*)")
_COLORS = ("#748ffc", "#0b7285", "#364fc7")
#: Of messages that were scheduled at once: the measurement and the heading of its column.
_BULK = {
    "lost": "lost",
    "twice": "twice",
    "early": "early",
    "bulk, all, late p50": "late p50",
    "bulk, all, late p99": "p99",
    "bulk, all, late max": "most",
    "bulk, away from kills, late p50": "p50 away from kills",
    "bulk, away from kills, late p99": "p99 away from kills",
    "bulk, delivered": "messages/s",
}
_AT_A_RATE = {
    "late p50": "late p50",
    "late p99": "p99",
    "late max": "most",
    "later in the last third": "later in the last third",
    "achieved by the producer": "produced/s",
}


def streaming_tables(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of ``docs/performance.md`` by their names."""
    software = f"Kafka {machine['kafka']}, PySpark {machine['pyspark']}"
    return {
        "streaming machine": machine_line(measurements, machine, software),
        "streaming bulk": _bulk_table(measurements),
        "streaming rates": _rates_table(measurements),
    }


def _bulk_table(measurements: Sequence[Measurement]) -> str:
    # "lost, of 200,000" is lost.
    found = {(m.store, m.name.partition(", of ")[0]): m for m in measurements}
    stores = dict.fromkeys(m.store for m in measurements if m.name.startswith("bulk"))
    lines = [f"| dispatcher | {' | '.join(_BULK.values())} |", f"|---|{'---:|' * len(_BULK)}"]
    lines += [f"| {store} | {' | '.join(_cell(found.get((store, name))) for name in _BULK)} |" for store in stores]
    return "\n".join(lines)


def _rates_table(measurements: Sequence[Measurement]) -> str:
    lines = [
        f"| dispatcher | scheduled/s | {' | '.join(_AT_A_RATE.values())} |",
        f"|---|---:|{'---:|' * len(_AT_A_RATE)}",
    ]
    for store, rates in _by_rate(measurements).items():
        for rate, found in rates.items():
            lines.append(f"| {store} | {rate:,} | {' | '.join(_cell(found.get(name)) for name in _AT_A_RATE)} |")
    return "\n".join(lines)


def _by_rate(measurements: Iterable[Measurement]) -> dict[str, dict[int, dict[str, Measurement]]]:
    """Return what was measured at steady rates, by dispatcher, rate and name."""
    found: dict[str, dict[int, dict[str, Measurement]]] = {}
    for m in measurements:
        if (parts := _RATE.fullmatch(m.name)) is not None:
            found.setdefault(m.store, {}).setdefault(int(parts[1]), {})[parts[2]] = m
    return found


def _cell(m: Measurement | None) -> str:
    if m is None:
        return ""
    return f"{show(m.value)} ms" if m.unit == "ms" else f"{m.value:,.0f}"


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the lateness at each rate, and return the file."""
    return save({"streaming.png": _draw(results)}, folder)


def _draw(results: Results) -> Figure:
    figure, axes = panels(2, height=4.2, sharey=True)
    for axis, share in zip(axes, ("late p50", "late p99"), strict=True):
        for (store, rates), color in zip(_by_rate(results.measurements).items(), _COLORS, strict=False):
            known = {rate: found[share].value for rate, found in rates.items() if share in found}
            axis.plot([*known], [*known.values()], "o-", color=color, label=store)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.xaxis.set_minor_formatter("")
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("messages scheduled a second; the last point of a line is where it falls behind, if it does")
        finish(axis, f"{share}, ms", grid="both")
    axes[0].legend(fontsize="small")
    figure.suptitle("Lateness at steady rates, for a reader of committed records")
    return figure
