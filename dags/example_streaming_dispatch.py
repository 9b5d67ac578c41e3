"""Dispatch the messages of a Kafka connection with Spark, in place of `airflow delay dispatcher --kafka CONN`.

Use it for more messages than one machine's dispatcher can handle; they come a few seconds late (docs/pipeline.md). It
is only for Kafka: RabbitMQ and the ledger need no such job. Only one kind of dispatcher serves a connection, and this
job refuses to start beside the other.

The task runs until you end it: mark it as failed, and all waiting messages stay in the checkpoint. If the job fails, it
is submitted again and continues from there. To return to the plain dispatcher, run the DAG with {"release": true}.

Fetch the jars of Spark's Kafka connector once (docs/pipeline.md) and name their folder.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param, task

from airflow_delay_provider import Backoff, SparkRetries, SparkSubmitRetryOperator
from airflow_delay_provider.spark.jobs import DISPATCH

#: The connection of the cluster, and the one of Kafka.
SPARK, BROKER = "spark_local", "delay_kafka_default"

with DAG(
    dag_id="example_streaming_dispatch",
    schedule=None,
    max_active_runs=1,
    params={
        "checkpoint": Param(
            "/tmp/delay-checkpoint",  # noqa: S108 - on a cluster, a folder that all machines share
            type="string",
            description="Folder of the waiting messages; never delete or share it.",
        ),
        "jars": Param("/opt/spark-kafka", type="string", description="Folder with the jars of Spark's connector."),
        "release": Param(False, type="boolean", description="Give the messages back to the plain dispatcher."),
    },
    render_template_as_native_obj=True,
    tags=["delay", "example", "spark"],
    doc_md=__doc__,
):

    @task
    def find_jars(params: dict) -> str:
        jars = sorted(str(jar) for jar in Path(params["jars"]).glob("*.jar"))
        if not jars:
            raise FileNotFoundError(f"jars: {params['jars']} contains none; fetch the connector as in docs/pipeline.md")
        return ",".join(jars)

    @task
    def choose_arguments(params: dict) -> list[str]:
        release = ["--release"] if params["release"] else []
        return ["--connection", BROKER, "--checkpoint", params["checkpoint"], *release]

    SparkSubmitRetryOperator(
        task_id="dispatch",
        conn_id=SPARK,
        job_connections=[BROKER],
        application=DISPATCH,
        application_args=choose_arguments(),
        jars=find_jars(),
        conf={"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"},
        # It is to run for months: many short outages are no reason to give up.
        spark_retries=SparkRetries(
            max_attempts=50,
            max_elapsed=timedelta(days=3650),
            backoff=Backoff(initial=timedelta(seconds=15), cap=timedelta(minutes=5), floor=timedelta(seconds=10)),
        ),
        retries=1,
    )
