"""The tables about Kafka in ``docs/performance.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import kafka_aims, kafka_dispatch
from benchmarks.kafka_writes import BUCKETS, DELAYS_MS, RADIXES
from benchmarks.measuring import Measurement
from benchmarks.results import show

DESIGNS = (*(f"radix {radix}" for radix in RADIXES), BUCKETS)


def kafka_tables(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> dict[str, str]:
    """Return them by their names."""
    return {
        "kafka machine": _machine_line(measurements, machine),
        "kafka aims": kafka_aims.table(measurements),
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


def _machine_line(measurements: Sequence[Measurement], machine: Mapping[str, Any]) -> str:
    size = "a quick run, not for reporting" if machine["quick"] else "a full run"
    return (
        f"Measured {measurements[0].date} ({size}) on {machine['cores']} cores, {machine['system']},"
        f" Python {machine['python']}, Kafka {machine['kafka']} (one node, idle: {machine['idle_cpu_percent']} % of a"
        f" core), confluent-kafka {machine['confluent-kafka']};"
        f" load average {machine['load_at_begin']} when it began and {machine['load_at_end']} when it ended."
    )


def _table(measurements: Sequence[Measurement], wanted: Callable[[Measurement], bool]) -> str:
    lines = ["| ladder | measurement | median | min - max | unit | ratio | to |", "|---|---|---:|---:|---|---:|---|"]
    for m in filter(wanted, measurements):
        ratio = "" if m.ratio is None else f"{m.ratio:.2f}"
        spread = "" if m.repeats == 1 else f"{show(m.min)} - {show(m.max)}"
        lines.append(f"| {m.store} | {m.name} | {show(m.value)} | {spread} | {m.unit} | {ratio} | {m.ratio_to} |")
    return "\n".join(lines)
