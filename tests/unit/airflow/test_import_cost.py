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
    "pika",
    "prometheus_client",
    "psycopg",
    "pyspark",
    "rich",
    "sqlalchemy",
}

PROGRAM = """
import json, sys, time
import airflow.sdk
from airflow.sdk import BaseHook, BaseOperator, BaseSensorOperator
before, started = set(sys.modules), time.perf_counter()
import {module}
print(json.dumps([(time.perf_counter() - started) * 1000, sorted(set(sys.modules) - before)]))
"""


@pytest.mark.parametrize(
    "module",
    [
        "airflow_delay_provider.operators.message",
        "airflow_delay_provider.sensors.message",
        "airflow_delay_provider.decorators.message",
        "airflow_delay_provider.hooks.delay",
        "airflow_delay_provider.hooks.kafka",
        "airflow_delay_provider.operators.spark",
        "airflow_delay_provider.policies.spark",
        "airflow_delay_provider.sensors.spark",
        "airflow_delay_provider.task_groups.spark",
    ],
)
def test_nothing_heavy_is_imported_beyond_what_airflow_imports(module: str) -> None:
    """``airflow.sdk`` itself may have loaded some of these; our modules add none and not a part of one."""
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)], check=True, capture_output=True, text=True
    ).stdout
    milliseconds, added = json.loads(printed.splitlines()[-1])
    print(f"{module}: {milliseconds:.0f} ms, {len(added)} modules")

    assert {name for name in added if name.partition(".")[0] in HEAVY} == set()
    assert {
        name for name in added if name.startswith(("airflow_delay_provider.ledger", "airflow_delay_provider.brokers."))
    } == set()
