"""A Spark job of the caller's choice in a group of attempts."""

from __future__ import annotations

import sys
from datetime import timedelta

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

from airflow_delay_provider import Backoff, spark_submit_with_retries

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"

with DAG("spark_group", schedule=None, params={"application": "", "source": ""}):
    group = spark_submit_with_retries(
        "orders",
        attempts=3,
        # So long that only an expedited ticket leads to the next attempt.
        backoff=Backoff(initial=timedelta(minutes=20), floor=timedelta(minutes=10), cap=timedelta(hours=1)),
        conn_id="spark_local",
        application="{{ params.application }}",
        application_args=["{{ params.source }}"],
        driver_memory="512m",
        conf={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "1",
            "spark.driver.extraJavaOptions": QUICK,
        },
        env_vars={"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
    )
    group >> EmptyOperator(task_id="after")
