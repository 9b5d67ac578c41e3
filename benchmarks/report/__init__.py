"""Puts the numbers of the last run into the documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import rabbitmq_report
from benchmarks.measurement import Measurement
from benchmarks.results import machine_line, show

_RATES = ("messages/s", "entries/s")


def fill(document: str, tables: Mapping[str, str]) -> str:
    """Replace what stands between ``<!-- name: begin -->`` and ``<!-- name: end -->`` for each named table."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found_begin, rest = document.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"the document has no place {begin} ... {end}; add both lines")
        document = f"{before}{begin}\n{table}\n{end}{after}"
    return document


def ledger_tables(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of ``docs/performance.md`` by their names."""
    postgresql = f"PostgreSQL {machine['postgresql']}" if machine["postgresql"] else "no PostgreSQL"
    software = (
        f"SQLite {machine['sqlite']}, {postgresql}, SQLAlchemy {machine['sqlalchemy']}, psycopg {machine['psycopg']}"
    )
    return {
        "ledger machine": machine_line(measurements, machine, software),
        "ledger rates": _table(measurements, lambda m: m.unit in (*_RATES, "times")),
        "ledger statements": _table(measurements, lambda m: m.unit == "statements/message"),
        "ledger lateness": _table(measurements, lambda m: m.unit == "ms"),
        "ledger lookups": _table(measurements, lambda m: m.unit == "us"),
    }


def rabbitmq_tables(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables about RabbitMQ in ``docs/performance.md`` by their names."""
    software = (
        f"RabbitMQ {machine['rabbitmq']} (idle: {machine['idle_cpu_percent']} % of a core), pika {machine['pika']},"
        f" kombu {machine['kombu']}"
    )

    def table(*units: str) -> str:
        return _table(measurements, lambda m: m.unit in units, heading="queues")

    return {
        "rabbitmq machine": machine_line(measurements, machine, software),
        "rabbitmq aims": rabbitmq_report.table(measurements),
        "rabbitmq rates": table("messages/s"),
        "rabbitmq cpu": table("us/message", "hops/message"),
        "rabbitmq lateness": table("ms", "published/s"),
    }


def lateness_job_tables(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables about the lateness job by their names."""
    software = (
        f"PostgreSQL {machine['postgresql']}, Spark {machine['spark']} with {machine['job_cores']} cores and a JVM of"
        f" {machine['driver_memory']}, {machine['rows']} journal entries on two days"
    )
    days = dict.fromkeys(m.name.partition(": ")[0] for m in measurements)
    found = {tuple(m.name.partition(": ")[::2]): m for m in measurements}
    lines = [f"| | {' | '.join(days)} |", f"|---|{'---:|' * len(days)}"]
    for what in dict.fromkeys(name for _, name in found):
        cells = (f"{show(found[day, what].value)} {found[day, what].unit}" for day in days)
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return {
        "lateness job machine": machine_line(measurements, machine, software),
        "lateness job": "\n".join(lines),
    }


def _table(
    measurements: Sequence[Measurement], wanted: Callable[[Measurement], bool], *, heading: str = "database"
) -> str:
    lines = [
        f"| {heading} | measurement | median | min - max | unit | ratio | to |",
        "|---|---|---:|---:|---|---:|---|",
    ]
    for m in filter(wanted, measurements):
        ratio = "" if m.ratio is None else f"{m.ratio:.2f}"
        spread = f"{show(m.min)} - {show(m.max)}"
        lines.append(f"| {m.store} | {m.name} | {show(m.value)} | {spread} | {m.unit} | {ratio} | {m.ratio_to} |")
    return "\n".join(lines)
