"""``python -m benchmarks.report``: write the numbers in ``benchmarks/results`` into ``docs/performance.md``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import fill, ledger_tables
from benchmarks.results import FOLDER, read_csv, read_machine

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"

tables = ledger_tables(read_csv(FOLDER / "ledger.csv"), read_machine(FOLDER / "ledger_machine.json"))
DOCUMENT.write_text(fill(DOCUMENT.read_text(), tables))
print(f"{DOCUMENT.name}: {', '.join(tables)}")
