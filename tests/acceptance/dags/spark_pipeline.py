"""A job that needs a connection which only Airflow knows."""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_delay_provider import SparkSubmitRetryOperator
from airflow_delay_provider.spark.jobs import BULK_SCHEDULE

with DAG("spark_pipeline", schedule=None, params={"input": "", "report": "", "channel": ""}):
    SparkSubmitRetryOperator(
        task_id="schedule",
        conn_id="spark_local",
        job_connections=["pipeline_broker"],
        application=BULK_SCHEDULE,
        application_args=[
            *("--input", "{{ params.input }}", "--channel", "{{ params.channel }}", "--deliver-after", "0"),
            *("--connection", "pipeline_broker", "--report", "{{ params.report }}"),
        ],
        conf={"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"},
        driver_memory="512m",
    )
