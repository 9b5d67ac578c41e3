"""Schedule each row of a file as a message, with Spark.

Without an input, the DAG writes a small Parquet file with a row that is wrong. On a cluster, name a file or folder that
all machines can read, and a folder that all can write to: {"input": "s3://data/reminders.parquet", "folder": "s3://..."}.

The ids depend on the run and the rows. A job that is run again schedules nothing twice where the broker knows ids
(ledger), and sends the same ids where it does not.

Define the connection of the cluster, or one that runs Spark inside the task:

    airflow connections add spark_local --conn-type spark --conn-host 'local[2]'
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from airflow.sdk import DAG, Param, task

from airflow_delay_provider import SparkSubmitRetryOperator
from airflow_delay_provider.spark.jobs import BULK_SCHEDULE

#: The connection of the cluster, and the one of the broker.
SPARK, BROKER = "spark_local", "delay_default"
ROWS = 300

with DAG(
    dag_id="example_bulk_schedule",
    schedule=None,
    params={
        "input": Param(None, type=["null", "string"], description="Parquet with the columns text and wait (seconds)."),
        "folder": Param(None, type=["null", "string"], description="Where to write rejects and the report."),
        "channel": Param("bulk", type="string", description="Queue, exchange:routing.key, topic or channel."),
        "seconds": Param(60, type="number", minimum=0, description="Rows of the small file are due in this time."),
    },
    tags=["delay", "example", "spark"],
    doc_md=__doc__,
):

    @task
    def choose_folder(params: dict, run_id: str) -> str:
        return params["folder"] or str(Path(tempfile.gettempdir()) / "example_bulk_schedule" / run_id)

    @task
    def prepare_input(folder: str, params: dict) -> str:
        if params["input"]:
            return params["input"]
        import pyarrow as pa
        import pyarrow.parquet as pq

        step = params["seconds"] / ROWS
        rows = [{"text": f"row {number}", "wait": number * step} for number in range(1, ROWS + 1)]
        rows.append({"text": "a row without a time", "wait": None})
        Path(folder).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), f"{folder}/reminders.parquet")
        return f"{folder}/reminders.parquet"

    folder = choose_folder()
    SparkSubmitRetryOperator(
        task_id="bulk_schedule",
        conn_id=SPARK,
        # The job looks up this connection in its environment. In deploy mode cluster, leave it out: docs/pipeline.md.
        job_connections=[BROKER],
        application=BULK_SCHEDULE,
        application_args=[
            *("--input", prepare_input(folder), "--format", "parquet", "--connection", BROKER),
            *("--column", "payload=text", "--column", "deliver_after=wait", "--channel", "{{ params.channel }}"),
            *("--id-prefix", "{{ run_id }}", "--report", f"{folder}/report.json"),
            # "fail" ends the task after all good rows are scheduled.
            *("--rejects", f"{folder}/rejects", "--on-rejects", "keep"),
        ],
        # For one small job on one machine; use the settings of your cluster.
        driver_memory="512m",
        conf={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
        retries=1,
    )
