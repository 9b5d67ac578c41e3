"""Each day, report how late messages were: figures in Parquet, a page with plots, a text for a chat.

A run reads the entries of the journal that are new since the run before, so the folder must stay; on a cluster, name
one that all machines share: {"output": "s3://reports/lateness"}. If a run was missed, the next one catches up; what the
journal no longer has by then is missing, and the report says so (--accept-gap).

Define the connection of the cluster, or one that runs Spark inside the task:

    airflow connections add spark_local --conn-type spark --conn-host 'local[2]'
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, CronTriggerTimetable, Param

from airflow_delay_provider import SparkSubmitRetryOperator
from airflow_delay_provider.spark.jobs import LATENESS

#: The connection of the cluster, and those whose journals are read.
SPARK, BROKERS = "spark_local", ["delay_default"]
HOME = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser()

with DAG(
    dag_id="lateness_report",
    # Without a start date, the first run is tonight's, and none is made up for the nights before.
    schedule=CronTriggerTimetable("0 1 * * *", timezone="UTC", run_immediately=timedelta(0)),
    catchup=False,
    # Two runs would read the same entries.
    max_active_runs=1,
    params={
        "output": Param(str(HOME / "lateness"), type="string", description="Folder of the figures and of the report."),
        "slo_seconds": Param(5, type="number", exclusiveMinimum=0, description="A message that is later is late."),
        "slo_target": Param(0.99, type="number", description="The share of messages that must not be late."),
    },
    tags=["delay", "example", "spark"],
    doc_md=__doc__,
) as dag:
    SparkSubmitRetryOperator(
        task_id="report",
        conn_id=SPARK,
        # The job looks up these connections in its environment. In deploy mode cluster, leave it out: docs/pipeline.md.
        job_connections=BROKERS,
        application=LATENESS,
        application_args=[
            *(word for broker in BROKERS for word in ("--connection", broker)),
            *("--output", "{{ params.output }}"),
            # Without it, each night fails once entries were deleted before a run could read them.
            "--accept-gap",
            *("--slo-seconds", "{{ params.slo_seconds }}", "--slo-target", "{{ params.slo_target }}"),
        ],
        # For one small job on one machine; use the settings of your cluster.
        driver_memory="512m",
        conf={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
        retries=1,
    )
