"""Spark jobs of the caller's choice, submitted again soon."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, get_current_context, task

from airflow_delay_provider import Backoff, SparkRetries, SparkSubmitRetryOperator

SOON = SparkRetries(
    max_attempts=3,
    backoff=Backoff(initial=timedelta(seconds=2), floor=timedelta(seconds=1), cap=timedelta(seconds=4)),
)
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
JOB: dict[str, Any] = {
    "application": "{{ params.application }}",
    "application_args": "{{ params.arguments }}",
    "conf": {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": QUICK,
        "spark.executor.extraJavaOptions": QUICK,
        "spark.executor.memory": "512m",
        "spark.stage.maxConsecutiveAttempts": "1",
    },
    "driver_memory": "512m",
    "env_vars": {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
    "spark_retries": SOON,
    "starvation_timeout": timedelta(seconds=25),
    "retries": 2,
    "retry_delay": timedelta(seconds=1),
}
#: A spark-submit of which hundreds can be run.
LIGHT = Path(__file__).parents[2] / "jobs" / "light"


def dag(name: str) -> DAG:
    return DAG(
        name,
        schedule=None,
        params={"application": "", "arguments": []},
        render_template_as_native_obj=True,
    )


with dag("spark_local"):
    SparkSubmitRetryOperator(task_id="job", conn_id="spark_local", **JOB)

with dag("spark_standalone"):
    SparkSubmitRetryOperator(task_id="job", conn_id="spark_standalone", **JOB)

with dag("spark_patient"):
    in_an_hour = Backoff(initial=timedelta(hours=1), floor=timedelta(hours=1), cap=timedelta(hours=1))
    SparkSubmitRetryOperator(
        task_id="job", conn_id="spark_local", **JOB | {"spark_retries": SparkRetries(backoff=in_an_hour)}
    )

with DAG("spark_stampede", schedule=None, params={"folder": "", "tasks": 1}, max_active_tasks=1000):

    @task
    def name_jobs() -> list[list[str]]:
        params = get_current_context()["params"]
        return [[params["folder"], str(number)] for number in range(params["tasks"])]

    together = Backoff(initial=timedelta(seconds=60), floor=timedelta(seconds=60), cap=timedelta(seconds=60))
    SparkSubmitRetryOperator.partial(
        task_id="job",
        conn_id="spark_standalone",
        application="nothing.py",
        env_vars={"PATH": f"{LIGHT}{os.pathsep}{os.environ['PATH']}"},
        spark_retries=SparkRetries(backoff=together),
        retries=3,
        retry_delay=timedelta(seconds=1),
        max_active_tis_per_dag=1000,
    ).expand(application_args=name_jobs())
