"""The lateness report as a page without scripts, and as Markdown. Names and reasons of users are escaped."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from airflow_delay_provider.spark.jobs.lateness_report import ANOMALY_FACTOR, Report, Summary

_STYLE = """
:root { color-scheme: light; --line: #e9ecef; --soft: #495057; }
body { font: 14px/1.5 system-ui, "Helvetica Neue", Arial, sans-serif; color: #212529; margin: 2rem auto;
  max-width: 1320px; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .7rem 1rem; flex: 1 1 200px; }
.card b { display: block; font-size: 1.4rem; font-weight: 600; }
.bad { color: #c92a2a; } .good { color: #2b8a3e; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .45rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); } th.text, td.text { text-align: left; }
td.reason { text-align: left; white-space: normal; overflow-wrap: anywhere; }
img { width: 100%; height: auto; }
"""
_TITLES = {
    "distribution": "Distribution over the period, by connection",
    "hours": "Lateness of each hour, busiest channels of each connection",
    "traffic": "Messages of each hour",
}
_TIME_NOTES = {
    "to_second": (
        "RabbitMQ records only the second in which it dispatched a message, and this job takes its end, or the due time"
        " if that is later. So lateness may be up to a second too large, and the journal cannot show whether a message"
        " was early."
    ),
    "when_read": (
        "the time of a dispatch is when the dispatcher that copies the journal (--index) has read it. So lateness is an"
        " upper bound, and the journal cannot show whether a message was early."
    ),
    "untimed": (
        "RabbitMQ before 4.0 does not record when it dispatched a message, so lateness is unknown and such messages are"
        " left out of it. With --copied, the job reads the copy that a dispatcher makes with --index."
    ),
}
_NOT_SHOWN = "unknown"
_CLASSES = {None: "", True: "good", False: "bad"}
_NOTHING = "-"


def render_html(report: Report, plots: Mapping[str, bytes]) -> str:
    """Return the page, with its plots inside."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Lateness report</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>Lateness report</h1>",
        *(f'<p class="soft">{escape(line)}</p>' for line in _header(report)),
        _cards(report),
        *(_html_table(title, rows) for title, rows in _tables(report) if title == "Connections"),
        *(f'<p class="soft">{escape(note)}</p>' for note in _notes(report)),
        *(_figure(name, picture) for name, picture in plots.items()),
        *(_html_table(title, rows) for title, rows in _tables(report) if title != "Connections"),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def render_markdown(report: Report, plots: Sequence[str]) -> str:
    """Return the same as Markdown; the plots are files beside it."""
    parts = ["# Lateness report", *(_plain(line) for line in _header(report))]
    parts += [f"## {title}\n\n{_markdown_table(rows)}" for title, rows in _tables(report)]
    parts += [_plain(note) for note in _notes(report)]
    parts += [f"## {_TITLES[name]}\n\n![{_TITLES[name]}](plots/{name}.svg)" for name in plots]
    return "\n\n".join(parts) + "\n"


def _header(report: Report) -> Iterator[str]:
    options = report.options
    yield from _warnings(report)
    if report.first is None:
        yield "The journals have no entries yet."
        return
    period = f"{report.first}" if report.first == report.last else f"{report.first} to {report.last}"
    yield f"{period} (UTC), made {report.made_at:%Y-%m-%d %H:%M} UTC"
    yield (
        f"Target: {options.slo_target:.3%} of messages dispatched within {options.slo_seconds:g} s of their due time."
    )


def _warnings(report: Report) -> Iterator[str]:
    for gap in report.gaps:
        yield (
            f"Incomplete: entries of {gap.connection} between {gap.since} and {gap.until} may be missing: {gap.reason}."
        )
    if report.later_days:
        yield (
            f"Left out: entries of {', '.join(report.later_days)}. These days are after today, so the clock of a client"
            " was wrong."
        )


def _notes(report: Report) -> Iterator[str]:
    yield (
        "Lateness is the time from a message's due time until it was handed to its channel; percentiles are exact."
        " Error budget: the share of it that late messages have used, 100 % is all of it. Duplicates: dispatches of"
        " an id beyond the first one and one for each time that it was requeued, looked for within two days."
    )
    for name, text in _TIME_NOTES.items():
        affected = [each.connection for each in report.connections if each.counts[name]]
        if affected:
            yield f"{', '.join(affected)}: {text}"


def _cards(report: Report) -> str:
    cards = []
    for each in report.connections:
        kept = None if each.in_time is None else each.in_time >= report.options.slo_target
        value = _unknown(each) if each.in_time is None else f"{_percent(each.in_time)} in time"
        more = f"{_count(each.counts['dispatched'])} dispatched, p99 {_lateness(each, 'p99_ms')}"
        cards.append(
            f'<div class="card">{escape(each.connection)}<b class="{_CLASSES[kept]}">{value}</b>'
            f'<span class="soft">{more}</span></div>'
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _unknown(each: Summary) -> str:
    return "lateness unknown" if each.counts["dispatched"] else "nothing dispatched"


#: A cell, and whether it is text.
Cell = tuple[str, bool]


def _tables(report: Report) -> Iterator[tuple[str, list[list[Cell]]]]:
    target = report.options.slo_target
    if report.connections:
        yield "Connections", [_heading("connection"), *(_row(each, target) for each in report.connections)]
    if report.channels:
        rest = f", the {len(report.channels)} busiest of {len(report.channels) + report.more_channels}"
        yield (
            f"Channels{rest if report.more_channels else ''}",
            [_heading("connection", "channel"), *(_row(each, target, with_channel=True) for each in report.channels)],
        )
    if report.anomalies:
        heading = [("hour (UTC)", True), ("connection", True), ("channel", True)]
        heading += [("dispatched", False), ("p99", False), ("usual p99", False)]
        rows = [
            [
                (f"{row['hour']:%Y-%m-%d %H:%M}", True),
                (row["connection"], True),
                (row["channel"], True),
                (_count(row["dispatched"]), False),
                (_duration(row["p99_ms"]), False),
                (_duration(row["usual_ms"]), False),
            ]
            for row in report.anomalies
        ]
        yield f"Unusual hours: p99 more than {ANOMALY_FACTOR:g} times the channel's median", [heading, *rows]
    if report.reasons:
        heading = [("connection", True), ("channel", True), ("change", True), ("messages", False), ("reason", True)]
        rows = [
            [
                (row["connection"], True),
                (row["channel"], True),
                (row["change"].replace("_", "-"), True),
                (_count(row["n"]), False),
                (row["reason"], True),
            ]
            for row in report.reasons
        ]
        yield "Messages that did not arrive", [heading, *rows]


def _heading(*names: str) -> list[Cell]:
    numbers = ["scheduled", "dispatched", "cancelled", "dead-lettered", "requeued", "p50", "p95", "p99", "max"]
    numbers += ["in time", "error budget", "duplicates", "early"]
    return [*((name, True) for name in names), *((name, False) for name in numbers)]


def _row(each: Summary, target: float, *, with_channel: bool = False) -> list[Cell]:
    counts, burn = each.counts, each.burn(target)
    early = _count(counts["early"]) if each.can_show_early or not counts["dispatched"] else _NOT_SHOWN
    numbers = [
        *(_count(counts[name]) for name in ("scheduled", "dispatched", "cancelled", "dead_lettered", "requeued")),
        *(_lateness(each, name) for name in ("p50_ms", "p95_ms", "p99_ms", "max_ms")),
        _NOTHING if each.in_time is None else _percent(each.in_time),
        _NOTHING if burn is None else f"{burn:,.0%}",
        _count(counts["duplicates"]),
        early,
    ]
    names = [each.connection, each.channel] if with_channel else [each.connection]
    return [*((name, True) for name in names), *((number, False) for number in numbers)]


def _figure(name: str, picture: bytes) -> str:
    # As an image, so that nothing in it can run.
    source = f"data:image/svg+xml;base64,{b64encode(picture).decode()}"
    return f'<h2>{_TITLES[name]}</h2><img alt="{_TITLES[name]}" src="{source}">'


def _html_table(title: str, rows: Sequence[Sequence[Cell]]) -> str:
    def cells(row: Sequence[Cell], tag: str) -> str:
        classes = ["reason" if len(text) > 60 else "text" if is_text else "" for text, is_text in row]
        return "".join(
            f"<{tag}{f' class={name!r}' if name else ''}>{escape(text)}</{tag}>"
            for (text, _), name in zip(row, classes, strict=True)
        )

    head, *body = rows
    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
    return f'<h2>{escape(title)}</h2><div class="wide"><table><tr>{cells(head, "th")}</tr>{lines}</table></div>'


def _markdown_table(rows: Sequence[Sequence[Cell]]) -> str:
    head, *body = rows
    line = "| " + " | ".join(":--" if is_text else "--:" for _, is_text in head) + " |"
    texts = ["| " + " | ".join(_plain(text) for text, _ in row) + " |" for row in (head, *body)]
    return "\n".join([texts[0], line, *texts[1:]])


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#&!~])", r"\\\1", " ".join(text.split()))


def _count(number: int) -> str:
    return f"{number:,}"


def _percent(share: float) -> str:
    """Return a share that is not rounded up to 100 %."""
    return "100 %" if share == 1 else f"{min(share * 100, 99.999):.3f} %"


def _lateness(each: Summary, name: str) -> str:
    """Return a lateness, marked as a bound if the times of dispatches are not exact."""
    bound = "≤ " if each.counts["to_second"] or each.counts["when_read"] else ""
    value = each.lateness[name]
    return _NOTHING if value is None else bound + _duration(value)


def _duration(value_ms: float | None) -> str:
    if value_ms is None:
        return _NOTHING
    if abs(value_ms) < 1000:
        return f"{value_ms:.0f} ms"
    if abs(value_ms) < 120_000:
        return f"{value_ms / 1000:.2f} s"
    minutes = value_ms / 60_000
    return f"{minutes:.1f} min" if abs(minutes) < 120 else f"{minutes / 60:.1f} h"
