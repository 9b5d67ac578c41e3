"""The requests to the HTTP API as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import plots
from benchmarks.measurement import Measurement, Results
from benchmarks.results import machine_line, show

#: The aim for the 99th percentile in the large ledger, in times that in the small one.
MOST = 1.5


@dataclass(frozen=True, kw_only=True)
class _Pair:
    store: str
    name: str
    small: Measurement
    large: Measurement


def label(name: str, messages: int, share: str) -> str:
    """Return the name of a measurement in a ledger of one size."""
    return f"{name}, {messages:,} messages, {share}"


def table(measurements: Sequence[Measurement]) -> str:
    """Return a row for each route, with the aim and whether it was met."""
    p50 = {(pair.store, pair.name): pair for pair in _pairs(measurements, "p50")}
    p99 = list(_pairs(measurements, "p99"))
    sizes = [_split(each.name)[1] for each in (p99[0].small, p99[0].large)]
    lines = [
        f"| database | request | p50 at {sizes[0]}, ms | p50 at {sizes[1]}, ms | p99 at {sizes[0]}, ms"
        f" | p99 at {sizes[1]}, ms | p50 ratio | p99 ratio | p99 <= {MOST:g} |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for pair in p99:
        typical = p50[(pair.store, pair.name)]
        values = (show(each.value) for each in (typical.small, typical.large, pair.small, pair.large))
        ratio = pair.large.ratio or 0
        verdict = "yes" if ratio <= MOST else "**no**"
        ratios = f"{typical.large.ratio:.2f} | {ratio:.2f}"
        lines.append(f"| {pair.store} | {pair.name} | {' | '.join(values)} | {ratios} | {verdict} |")
    return "\n".join(lines)


def api_tables(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables about the HTTP API in ``docs/performance.md`` by their names."""
    postgresql = f"PostgreSQL {machine['postgresql']}" if machine["postgresql"] else "no PostgreSQL"
    software = (
        f"Airflow {machine['airflow']}, FastAPI {machine['fastapi']}, uvicorn {machine['uvicorn']},"
        f" SQLite {machine['sqlite']}, {postgresql};"
        f" {machine['repeats']} repeats of {machine['requests']} requests for each route and ledger"
    )
    return {"api machine": machine_line(measurements, machine, software), "api requests": table(measurements)}


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the 99th percentiles in both ledgers, and return the file."""
    return plots.save({"api_flat.png": _draw(results)}, folder)


def _draw(results: Results) -> Figure:
    stores = list(dict.fromkeys(m.store for m in results.measurements))
    by_store = {store: [p for p in _pairs(results.measurements, "p99") if p.store == store][::-1] for store in stores}
    height = 1.6 + 0.27 * max(map(len, by_store.values()))
    figure, axes = plots.panels(len(stores), height=height, sharey=True)
    for axis, store in zip(axes, stores, strict=True):
        pairs = by_store[store]
        for position, pair in enumerate(pairs):
            sizes = [_split(each.name)[1] for each in (pair.small, pair.large)] if position == 0 else [None, None]
            ends = (pair.small.value, pair.large.value)
            missed = (pair.large.ratio or 0) > MOST
            axis.plot(ends, [position, position], color=plots.BARE_COLOR, lw=1, zorder=1)
            axis.scatter(ends[:1], [position], s=60, facecolors="none", edgecolors="black", label=sizes[0])
            axis.scatter(ends[1:], [position], s=24, color=plots.COLORS[store], label=sizes[1])
            axis.annotate(
                f"x {pair.large.ratio:.2f}",
                (max(ends), position),
                xytext=(9, 0),
                textcoords="offset points",
                va="center",
                color=plots.AIM_COLOR if missed else "black",
            )
        axis.set_yticks(range(len(pairs)), [pair.name for pair in pairs])
        axis.set_xscale("log")
        axis.margins(x=0.15)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("p99, milliseconds a request")
        axis.legend(loc="lower right", fontsize="small")
        plots.finish(axis, store, grid="x")
    figure.suptitle(
        f"What a request to the HTTP API costs, and how many times more in the large ledger (aim: {MOST:g})"
    )
    return figure


def _pairs(measurements: Sequence[Measurement], share: str) -> Iterator[_Pair]:
    by_name = {(m.store, m.name): m for m in measurements}
    for large in measurements:
        name, _, kind = _split(large.name)
        if large.ratio_to and kind == share:
            yield _Pair(store=large.store, name=name, small=by_name[(large.store, large.ratio_to)], large=large)


def _split(label: str) -> tuple[str, str, str]:
    name, size, share = label.rsplit(", ", 2)
    return name, size, share
