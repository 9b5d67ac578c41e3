"""``python -m benchmarks.report``: write the numbers in ``benchmarks/results`` into ``docs/performance.md``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.api_report import api_tables
from benchmarks.kafka_report import kafka_tables
from benchmarks.pipeline_report import pipeline_tables
from benchmarks.report import fill, lateness_job_tables, ledger_tables, rabbitmq_tables
from benchmarks.results import FOLDER, read_csv, read_machine
from benchmarks.streaming_report import streaming_tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"

TABLES = {
    "ledger": ledger_tables,
    "rabbitmq": rabbitmq_tables,
    "kafka": kafka_tables,
    "api": api_tables,
    "pipeline": pipeline_tables,
    "streaming": streaming_tables,
    "lateness_job": lateness_job_tables,
}

for name, tables_of in TABLES.items():
    if (FOLDER / f"{name}.csv").exists():
        tables = tables_of(read_csv(FOLDER / f"{name}.csv"), read_machine(FOLDER / f"{name}_machine.json"))
        DOCUMENT.write_text(fill(DOCUMENT.read_text(), tables))
        print(f"{DOCUMENT.name}: {', '.join(tables)}")
