"""The plots of the lateness report, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime, timedelta
from io import BytesIO
from typing import TYPE_CHECKING, Any

from airflow_delay_provider.spark.jobs.lateness_report import CURVE, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#0b7285", "#5f3dc4", "#e67700", "#2b8a3e", "#c2255c", "#495057")
_LIMIT = "#c92a2a"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#adb5bd",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    # Names of channels are text, not formulas.
    "text.parse_math": False,
}
_WIDTH = 9.6
#: A lateness below this is drawn here: the scale is logarithmic.
_LEAST_MS = 1.0
_SECOND_MS = 1000.0


def draw_plots(report: Report) -> dict[str, bytes]:
    """Return pictures by name; none without a dispatch."""
    import matplotlib as mpl

    if not report.curves:
        return {}
    pictures: dict[str, Callable[[Report], Figure]] = {
        "distribution": _draw_distribution,
        "hours": _draw_hours,
        "traffic": _draw_traffic,
    }
    # A fixed salt: the same figures make the same file.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "lateness"}):
        return {name: _svg(draw(report)) for name, draw in pictures.items()}


def _draw_distribution(report: Report) -> Figure:
    """Draw which share of messages was at most so late, by connection."""
    figure, (axis,) = _panels(1, 2.9)
    for color, (connection, curve) in zip(_colors(report.curves), report.curves.items(), strict=True):
        shown = [max(value, _LEAST_MS) for value in curve]
        axis.plot(shown, [share * 100 for share in CURVE], color=color, label=_short(connection), lw=1.8)
    _mark_limit(axis.axvline, report)
    axis.axhline(report.options.slo_target * 100, color=_LIMIT, lw=0.8, ls=":")
    axis.set_xscale("log")
    axis.set_xlim(_LEAST_MS, max(report.options.slo_seconds * 2 * _SECOND_MS, _longest(report)))
    axis.set_ylim(0, 101)
    axis.xaxis.set_major_formatter(_duration)
    axis.set_xlabel(f"lateness (below {_LEAST_MS:g} ms drawn as {_LEAST_MS:g} ms)")
    axis.set_ylabel("% of dispatched messages")
    axis.set_title("How late messages were dispatched: share of messages at most so late")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def _draw_hours(report: Report) -> Figure:
    """Draw p99 and p50 of each hour, one panel a connection, one line a channel."""
    connections = list(report.curves)
    figure, axes = _panels(len(connections), 2.3, sharex=True)
    top = max(report.options.slo_seconds * 2 * _SECOND_MS, _longest(report))
    for axis, connection in zip(axes, connections, strict=True):
        of_connection = [row for row in report.hours if row["connection"] == connection]
        channels = sorted({row["channel"] for row in of_connection})
        for color, channel in zip(_colors(channels), channels, strict=True):
            rows = [row for row in of_connection if row["channel"] == channel]
            for name, style, label in (("p99_ms", "-", _short(channel)), ("p50_ms", ":", None)):
                values = [max(row[name], _LEAST_MS) for row in rows]
                axis.plot(*_with_breaks(rows, values), style, color=color, marker="o", ms=4, lw=1.3, label=label)
        _mark_limit(axis.axhline, report)
        axis.set_yscale("log")
        axis.set_ylim(_LEAST_MS, top)
        axis.yaxis.set_major_formatter(_duration)
        axis.set_title(f"{_short(connection)}: p99 (solid) and p50 (dotted) of each hour")
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _finish_hours(axes, report)
    return figure


def _draw_traffic(report: Report) -> Figure:
    """Draw messages by hour, one panel a connection."""
    connections = sorted({row["connection"] for row in report.traffic})
    figure, axes = _panels(len(connections), 1.7, sharex=True)
    hour = timedelta(hours=1)
    for axis, connection in zip(axes, connections, strict=True):
        rows = [row for row in report.traffic if row["connection"] == connection]
        middle = [row["hour"] + hour / 2 for row in rows]
        axis.bar(middle, [row["dispatched"] for row in rows], hour * 0.8, color="#74c0fc", label="dispatched")
        axis.bar(middle, [row["late"] for row in rows], hour * 0.8, color=_LIMIT, label="of these, late")
        scheduled = [row["scheduled"] for row in rows]
        axis.plot(middle, scheduled, "D", color="#495057", ms=3.5, label="scheduled")
        axis.set_ylim(0, None)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(f"{_short(connection)}: messages an hour")
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _finish_hours(axes, report)
    return figure


def _panels(n: int, height: float, *, sharex: bool = False) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    # Without pyplot: it needs no display and changes no global state.
    figure = Figure(figsize=(_WIDTH, height * max(n, 1) + 0.4), layout="constrained")
    axes = figure.subplots(n, 1, sharex=sharex, squeeze=False)[:, 0]
    for axis in axes:
        axis.grid(alpha=0.3, which="major")
        axis.set_axisbelow(True)
    return figure, list(axes)


def _finish_hours(axes: Sequence[Any], report: Report) -> None:
    """Show whole hours from the first to the last one, and name the time zone."""
    from matplotlib import dates

    hours = [row["hour"] for row in report.traffic]
    make: Any = dates
    locator = make.AutoDateLocator(minticks=3, maxticks=9)
    for axis in axes:
        axis.set_xlim(min(hours) - timedelta(minutes=30), max(hours) + timedelta(minutes=90))
        axis.xaxis.set_major_locator(locator)
        axis.xaxis.set_major_formatter(make.ConciseDateFormatter(locator, show_offset=False))
    axes[-1].set_xlabel("hour, UTC")


def _with_breaks(rows: Sequence[Mapping[str, Any]], values: Sequence[float]) -> tuple[list[datetime], list[float]]:
    """Return points in the middle of their hours, with a break where hours without dispatches lie between."""
    times: list[datetime] = []
    shown: list[float] = []
    before: datetime | None = None
    for row, value in zip(rows, values, strict=True):
        if before is not None and row["hour"] - before > timedelta(hours=1):
            times.append(before + timedelta(hours=1))
            shown.append(float("nan"))
        times.append(row["hour"] + timedelta(minutes=30))
        shown.append(value)
        before = row["hour"]
    return times, shown


def _mark_limit(line: Callable[..., Any], report: Report) -> None:
    seconds = report.options.slo_seconds
    line(seconds * _SECOND_MS, color=_LIMIT, lw=0.8, label=f"limit: {seconds:g} s")


def _longest(report: Report) -> float:
    return max((curve[-1] for curve in report.curves.values()), default=0.0) * 1.5


def _duration(value_ms: float, _: object = None) -> str:
    for unit, size in (("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if value_ms >= size:
            return f"{value_ms / size:g} {unit}"
    return f"{value_ms:g} ms"


def _colors(names: Sized) -> list[str]:
    return [_COLORS[number % len(_COLORS)] for number in range(len(names))]


def _short(name: str) -> str:
    """Return a name that fits into a legend; one with an underscore first would be left out of it."""
    text = name if len(name) <= 28 else f"{name[:27]}…"
    return f" {text}" if text.startswith("_") else text


def _svg(figure: Figure) -> bytes:
    stream = BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
