"""The DAGs that schedule with Spark and report lateness, in a real Airflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.spark.retries import HISTORY_KEY
from tests.acceptance.runs import Run, Start
from tests.acceptance.test_spark_retries import define
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi

pytestmark = pytest.mark.timeout(900)

SECONDS = 400
SECRET = "planted-s3cret"


@pytest.fixture(scope="module", autouse=True)
def spark_local(api: AirflowApi) -> None:
    """Where the jobs run."""
    define(api, "spark_local", {"conn_type": "spark", "host": "local[1]"})


@pytest.fixture
def connection(api: AirflowApi, airflow: Airflow) -> Iterator[str]:
    """A connection of Airflow's database, with a secret in it."""
    extra = {"ledger_url": airflow.ledger_url}
    define(api, "pipeline_broker", {"conn_type": "delay", "password": SECRET, "extra": extra})
    yield "pipeline_broker"
    api.http.delete("/api/v2/connections/pipeline_broker")


def wait(run: Run, task_id: str) -> None:
    state = run.api.wait_for_run(run.dag_id, run.run_id, seconds=SECONDS)
    assert state == "success", run.log(task_id)[-5000:]


def test_rows_of_a_file_are_scheduled_and_the_report_counts_them(
    start: Start, broker: EmbeddedBroker, airflow: Airflow, tmp_path: Path
) -> None:
    channel = f"bulk-{uuid4().hex[:8]}"
    folder = tmp_path / "bulk"
    bulk = start("example_bulk_schedule", {"channel": channel, "folder": str(folder), "seconds": 1})
    wait(bulk, "bulk_schedule")
    report = json.loads((folder / "report.json").read_text())
    assert (report["rows"], report["rejected"]) == (301, 1)
    assert report["outcomes"]["scheduled"] + report["outcomes"]["dispatched"] == 300
    [rejects] = (folder / "rejects").glob("*.jsonl")
    assert json.loads(rejects.read_text())["row"]["payload"] == "a row without a time"
    airflow.wait_for(
        lambda: len(broker.peek(channel, limit=500)) == 300, what="all rows are in the channel", seconds=60
    )

    lateness = start("lateness_report", {"output": str(tmp_path / "lateness")})
    wait(lateness, "report")
    assert (tmp_path / "lateness" / "report.html").exists()
    assert channel in (tmp_path / "lateness" / "report.html").read_text()


def test_a_connection_that_only_airflow_knows_reaches_the_job_and_its_secret_nothing_else(
    start: Start, connection: str, broker: EmbeddedBroker, airflow: Airflow, tmp_path: Path
) -> None:
    channel = f"bulk-{uuid4().hex[:8]}"
    (tmp_path / "rows.jsonl").write_text('{"payload": "one"}\n{"payload": "two"}\n')
    run = start(
        "spark_pipeline",
        {"input": str(tmp_path / "rows.jsonl"), "report": str(tmp_path / "report"), "channel": channel},
    )
    wait(run, "schedule")
    assert json.loads((tmp_path / "report").read_text())["connection"] == connection
    assert sorted(message.payload for message in broker.peek(channel, limit=5)) == [b"one", b"two"]
    task = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/schedule"
    shown = [
        run.log("schedule"),
        json.dumps(run.api.get(task)),
        json.dumps(run.api.get(f"{task}/state-store/{HISTORY_KEY}")),
        json.dumps(run.api.get(f"{task}/xcomEntries")),
        *(file.read_text(errors="replace") for file in airflow.log_dir.rglob("*.log")),
    ]
    assert [text[:200] for text in shown if SECRET in text] == []
