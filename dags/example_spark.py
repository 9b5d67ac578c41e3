"""Retry a Spark job whose source may be down, without a worker slot between the attempts.

`example_spark` needs a connection that runs Spark inside the task, `example_spark_cluster` one of a cluster:

    airflow connections add spark_local --conn-type spark --conn-host 'local[1]'
    airflow connections add spark_default --conn-type spark --conn-host spark://spark-master --conn-port 7077

While the source is down, the job fails with "Connection refused". This is a temporary failure, so the task is deferred.
Run `python -m http.server 8799 --bind 127.0.0.1` in a folder with a file orders.jsonl, and the next attempt succeeds.
Executors read the source, so on a cluster it must run where they do. With docker-compose.yaml:

    docker compose exec --detach spark-worker python -m http.server 8799 --directory /opt/airflow/dags/jobs

Use another source with {"source": "http://127.0.0.1:8000/orders.jsonl"}.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_delay_provider import Backoff, SparkRetries, SparkSubmitRetryOperator

SOURCE = "http://127.0.0.1:8799/orders.jsonl"

for dag_id, conn_id in (("example_spark", "spark_local"), ("example_spark_cluster", "spark_default")):
    with DAG(
        dag_id=dag_id,
        schedule=None,
        params={"source": Param(SOURCE, type="string", description="URL of JSON lines with id and state.")},
        tags=["delay", "example", "spark"],
        doc_md=__doc__,
    ):
        SparkSubmitRetryOperator(
            task_id="count_orders",
            conn_id=conn_id,
            application=str(Path(__file__).parent / "jobs" / "count_orders.py"),
            application_args=["{{ params.source }}"],
            # For one small job on one machine; use the settings of your cluster.
            driver_memory="512m",
            conf={
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                "spark.sql.shuffle.partitions": "1",
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            },
            # Waits 30-60, 30-120, 30-240 ... up to 30-600 seconds before the retries, for two hours at most.
            spark_retries=SparkRetries(
                max_attempts=8,
                max_elapsed=timedelta(hours=2),
                backoff=Backoff(initial=timedelta(seconds=60), cap=timedelta(minutes=10), floor=timedelta(seconds=30)),
            ),
            # If the worker is lost, Airflow's own retry continues with the remaining attempts.
            retries=1,
        )
