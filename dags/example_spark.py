"""A Spark job whose source may be down: it is submitted again by a message, and nothing waits but that message.

It needs a connection that runs Spark in the task's own process tree, for it is an example:

    airflow connections add spark_local --conn-type spark --conn-host 'local[1]'

While nobody answers at the source, the job fails with "Connection refused", which may pass, and the task is deferred.
`python -m http.server 8799 --bind 127.0.0.1` in a folder with a file orders.jsonl lets the next attempt succeed.
Start it with another source: {"source": "http://127.0.0.1:8000/orders.jsonl"}
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.operators.spark import SparkSubmitRetryOperator
from airflow_delay_provider.spark.retrying import SparkRetries

SOURCE = "http://127.0.0.1:8799/orders.jsonl"

with DAG(
    dag_id="example_spark",
    schedule=None,
    params={"source": Param(SOURCE, type="string", description="Where JSON lines with id and state are.")},
    tags=["delay", "example", "spark"],
    doc_md=__doc__,
):
    SparkSubmitRetryOperator(
        task_id="count_orders",
        conn_id="spark_local",
        application=str(Path(__file__).parent / "jobs" / "count_orders.py"),
        application_args=["{{ params.source }}"],
        # For one small job on one machine; a real one has its own.
        driver_memory="512m",
        conf={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "1",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        },
        # Before retry 1, 2, 3 ...: 30-60, 30-120, 30-240 ... up to 30-600 seconds, for two hours at most.
        spark_retries=SparkRetries(
            max_attempts=8,
            max_elapsed=timedelta(hours=2),
            backoff=Backoff(initial=timedelta(seconds=60), cap=timedelta(minutes=10), floor=timedelta(seconds=30)),
        ),
        # So that it goes on where it stood when its worker is lost.
        retries=1,
    )
