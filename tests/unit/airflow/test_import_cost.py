"""DAG files are parsed all the time: what they import of this package must be light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "alembic",
    "confluent_kafka",
    "fastapi",
    "httpx",
    "jinja2",
    "pika",
    "prometheus_client",
    "psycopg",
    "pyspark",
    "rich",
    "sqlalchemy",
}

MODULES = [
    "airflow_delay_provider.operators.schedule",
    "airflow_delay_provider.sensors.message",
    "airflow_delay_provider.decorators.schedule",
    "airflow_delay_provider.hooks.delay",
    "airflow_delay_provider.hooks.kafka",
    "airflow_delay_provider.operators.spark",
    "airflow_delay_provider.spark.policy",
    "airflow_delay_provider.sensors.spark",
    "airflow_delay_provider.spark.group",
]
#: Each module is imported by a process of its own, which is a copy of one that has imported Airflow.
PROGRAM = f"""
import importlib, json, os, sys, time
import airflow.sdk
from airflow.sdk import BaseHook, BaseOperator, BaseSensorOperator
for module in {MODULES!r}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, module
        continue
    before, started = set(sys.modules), time.perf_counter()
    importlib.import_module(module)
    added = sorted(set(sys.modules) - before)
    print(json.dumps([module, (time.perf_counter() - started) * 1000, added]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, tuple[float, list[str]]]:
    """Milliseconds and added modules of each import."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["airflow_delay_provider')]
    return {module: (milliseconds, added) for module, milliseconds, added in lines}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_heavy_is_imported_beyond_what_airflow_imports(
    module: str, imported: dict[str, tuple[float, list[str]]]
) -> None:
    """``airflow.sdk`` itself may have loaded some of these; our modules add none and not a part of one."""
    milliseconds, added = imported[module]
    assert module in added
    print(f"{module}: {milliseconds:.0f} ms, {len(added)} modules")

    assert {name for name in added if name.partition(".")[0] in HEAVY} == set()
    assert {
        name
        for name in added
        if name.startswith(("airflow_delay_provider.brokers.ledger", "airflow_delay_provider.brokers."))
    } == set()
