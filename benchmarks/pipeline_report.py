"""The results of the pipeline benchmark: aims, the tables in ``docs/performance.md``, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.measurement import Measurement, Results
from benchmarks.plots import BARE_COLOR, draw_bars, finish, panels, save
from benchmarks.rabbitmq_report import Aim
from benchmarks.results import machine_line, show

#: By store and variant.
Rates = dict[tuple[str, str], list[float]]
HOOK = "hook, 1 process"
#: The part of the JVM's heap that is in use. Its process takes what it was given, before it collects garbage.
LIVE = "JVM after collections"
_UNIT = "rows/s"
_WAYS = ("data source", "JVM sink")
AIMS = (
    Aim(name="rate: JVM sink, 2 cores / hook", value=3),
    Aim(name="rate: data source, 2 cores / hook", value=1.7),
    Aim(name="rate: data source, 2 cores / 1 core", value=1.6),
    *(Aim(name=f"memory: {way}, Python, most / fewest rows", value=1.15, most=True) for way in _WAYS),
    *(
        Aim(name=f"memory: {way}, {part}, most / fewest rows", value=1.15, most=True)
        for part in ("JVM", LIVE)
        for way in _WAYS
    ),
)


def way_name(way: str, cores: int) -> str:
    """Return the name of a variant."""
    return f"{way}, {cores} core{'s' if cores > 1 else ''}"


def memory_name(way: str, rows: int, part: str) -> str:
    """Return the name of a measurement of memory."""
    return f"{way}: memory of {part}, {rows} rows"


def add_rates(results: Results, rates: Rates) -> None:
    """Add rates beside the hook's, and the ratios that are aimed at."""
    for (store, name), values in rates.items():
        base: dict[str, Any] = {} if name == HOOK else {"ratio_to": HOOK, "base": rates[store, HOOK]}
        results.add(store, name, values, _UNIT, **base)
    for store in dict.fromkeys(store for store, _ in rates):
        for way in _WAYS:
            two, one = rates.get((store, way_name(way, 2))), rates.get((store, way_name(way, 1)))
            if two is not None:
                _add_ratio(results, store, f"rate: {way}, 2 cores / hook", two, rates[store, HOOK])
            if two is not None and one is not None:
                _add_ratio(results, store, f"rate: {way}, 2 cores / 1 core", two, one)


def add_cpu(results: Results, cpu: Rates) -> None:
    """Add the processor time of the clients, which other load changes less than the rate."""
    for (store, name), values in cpu.items():
        base: dict[str, Any] = {} if name == HOOK else {"ratio_to": f"{HOOK}: CPU", "base": cpu[store, HOOK]}
        results.add(store, f"{name}: CPU", values, "us/row", **base)


def add_growth(results: Results, rows: Sequence[int]) -> None:
    """Add how much more memory the most rows take than the fewest."""
    if len(rows) < 2:
        return
    for store in dict.fromkeys(m.store for m in results.measurements):
        for way in _WAYS:
            for part in ("JVM", LIVE, "Python"):
                few = results.get(store, memory_name(way, min(rows), part))
                many = results.get(store, memory_name(way, max(rows), part))
                if few is not None and many is not None and few.value > 0:
                    name = f"memory: {way}, {part}, most / fewest rows"
                    results.add(store, name, [many.value / few.value], "times")


def _add_ratio(results: Results, store: str, name: str, mine: Sequence[float], others: Sequence[float]) -> None:
    results.add(store, name, [ours / its for ours, its in zip(mine, others, strict=True)], "times")


def aims_table(measurements: Sequence[Measurement]) -> str:
    """Return all aims and their measurements."""
    lines = ["| store | measurement | aim | median | min - max | met |", "|---|---|---:|---:|---|---|"]
    for aim in AIMS:
        for m in filter(aim.is_of, measurements):
            wanted = f"{'<=' if aim.most else '>='} {aim.value:g}"
            met = "yes" if aim.is_met_by(m) else "**no**"
            lines.append(f"| {m.store} | {m.name} | {wanted} | {m.value:.2f} | {m.min:.2f} - {m.max:.2f} | {met} |")
    return "\n".join(lines)


def pipeline_tables(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables by their names."""
    software = (
        f"PySpark {machine['pyspark']}, PyArrow {machine['pyarrow']}, confluent-kafka {machine['confluent-kafka']},"
        f" pika {machine['pika']}"
    )
    return {
        "pipeline machine": machine_line(measurements, machine, software, rows=f", {machine['rows']} rows"),
        "pipeline aims": aims_table(measurements),
        "pipeline rates": _table(measurements, _UNIT),
        "pipeline cpu": _table(measurements, "us/row"),
        "pipeline memory": _table(measurements, "MiB"),
    }


def _table(measurements: Sequence[Measurement], unit: str) -> str:
    lines = ["| store | measurement | median | min - max | unit | ratio | to |", "|---|---|---:|---:|---|---:|---|"]
    for m in (each for each in measurements if each.unit == unit):
        ratio = "" if m.ratio is None else f"{m.ratio:.2f}"
        spread = "" if m.repeats == 1 else f"{show(m.min)} - {show(m.max)}"
        lines.append(f"| {m.store} | {m.name} | {show(m.value)} | {spread} | {m.unit} | {ratio} | {m.ratio_to} |")
    return "\n".join(lines)


_COLORS = {"data source": "#0b7285", "JVM sink": "#364fc7", "hook": "#748ffc"}


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the rates and the memory, and return the file."""
    return save({"pipeline.png": _draw(results)}, folder)


def _draw(results: Results) -> Figure:
    rates = [m for m in results.measurements if m.unit == _UNIT][::-1]
    memory = [m for m in results.measurements if m.unit == "MiB"][::-1]
    figure, axes = panels(2, height=1.4 + 0.3 * max(len(rates), len(memory)), sharey=False)
    for axis, measured, title in ((axes[0], rates, "rows a second"), (axes[1], memory, "most memory, MiB")):
        draw_bars(
            axis,
            measured,
            names=[f"{m.store}: {m.name}" for m in measured],
            colors=[_color(m.name) for m in measured],
            labels=[f"{show(m.value)} (x {m.ratio:.1f})" if m.ratio else show(m.value) for m in measured],
        )
        axis.margins(x=0.25)
        finish(axis, title, grid="x")
    figure.suptitle("A Parquet file scheduled: grey is the bare client library, x is beside the hook")
    return figure


def _color(name: str) -> str:
    return next((color for begin, color in _COLORS.items() if name.startswith(begin)), BARE_COLOR)
