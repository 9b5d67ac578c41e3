"""Results as a table on the terminal, as CSV, and read back."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measurement import Measurement

FIELDS = [field.name for field in dataclasses.fields(Measurement)]
FOLDER = Path(__file__).parent / "results"
QUICK_FOLDER = Path(".run/benchmarks")


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return the options of a benchmark."""
    options = argparse.ArgumentParser(prog=f"./dev bench {name}", description=description)
    options.add_argument("--quick", action="store_true", help="small sizes, to see that it works; not for reporting")
    options.add_argument(
        "--results", type=Path, help=f"folder for CSV and pictures; default: benchmarks/results, quick: {QUICK_FOLDER}"
    )
    return options


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write one row a measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for measurement in measurements:
            writer.writerow([_text(value) for value in dataclasses.astuple(measurement)])


def read_csv(path: Path) -> list[Measurement]:
    """Read what :func:`write_csv` wrote."""
    with path.open(newline="") as file:
        return [
            Measurement(
                date=row["date"],
                store=row["store"],
                name=row["name"],
                value=float(row["value"]),
                unit=row["unit"],
                ratio_to=row["ratio_to"],
                ratio=float(row["ratio"]) if row["ratio"] else None,
                min=float(row["min"]),
                max=float(row["max"]),
                repeats=int(row["repeats"]),
            )
            for row in csv.DictReader(file)
        ]


def write_machine(path: Path, software: Mapping[str, Any], *, quick: bool, load_at_begin: float) -> None:
    """Write what the numbers were measured on."""
    machine = {
        "cores": os.cpu_count(),
        "load_at_begin": round(load_at_begin, 2),
        "load_at_end": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **software,
        "quick": quick,
    }
    path.write_text(json.dumps(machine, indent=2) + "\n")


def read_machine(path: Path) -> dict[str, Any]:
    """Read what :func:`write_machine` wrote."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def print_table(title: str, measurements: Sequence[Measurement]) -> None:
    """Print all measurements."""
    table = Table(title=f"{title}: medians of the repeats")
    for heading in ("store", "measurement"):
        table.add_column(heading, no_wrap=True)
    for heading in ("median", "min", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("ratio", justify="right")
    table.add_column("to")
    before = ""
    for m in measurements:
        if before and m.store != before:
            table.add_section()
        before = m.store
        ratio = "" if m.ratio is None else f"{m.ratio:.2f}"
        table.add_row(m.store, m.name, show(m.value), show(m.min), show(m.max), m.unit, ratio, m.ratio_to)
    Console(width=None if Console().is_terminal else 190).print(table)


def machine_line(
    measurements: Sequence[Measurement], machine: Mapping[str, Any], software: str, *, rows: str = ""
) -> str:
    """Return the sentence that says when, how and on what was measured."""
    size = "a quick run, not for reporting" if machine["quick"] else "a full run"
    return (
        f"Measured {measurements[0].date} ({size}{rows}) on {machine['cores']} cores, {machine['system']},"
        f" Python {machine['python']}, {software};"
        f" load average {machine['load_at_begin']} when it began and {machine['load_at_end']} when it ended."
    )


def show(value: float) -> str:
    """Return a number with about three digits that matter."""
    if value and abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
