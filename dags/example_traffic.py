"""Fill the pages *Delayed messages* with life: messages that are due in seconds, minutes, hours and days.

Uses the default connection of each broker that is defined, or the connections that you name: ``{"connections":
["delay_default"]}``. On RabbitMQ and Kafka, the queue or topic ``orders`` must exist.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param, task
from airflow.sdk.bases.hook import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_delay_provider import ScheduleMessageOperator

#: Seconds until each message is due: many soon, some in minutes and hours, a few in days.
DELAYS = [
    *range(5, 65, 2),
    *range(90, 3600, 90),
    *range(3600, 24 * 3600, 3000),
    *(day * 24 * 3600 for day in (1, 2, 3, 7, 14, 21, 28, 30)),
]

with DAG(
    dag_id="example_traffic",
    schedule=None,
    params={"connections": Param(None, type=["null", "array"], description="By default all that are defined.")},
    default_args={"retries": 2, "retry_delay": timedelta(seconds=5)},
    tags=["delay", "example"],
    doc_md=__doc__,
):

    @task
    def find_connections(params: dict) -> list[str]:
        if params["connections"]:
            return params["connections"]
        found = ["delay_default"]  # works without being defined
        for conn_id in ("rabbitmq_default", "delay_kafka_default"):
            try:
                BaseHook.get_connection(conn_id)
            except AirflowNotFoundException:
                continue
            found.append(conn_id)
        return found

    ScheduleMessageOperator.partial(
        task_id="schedule_orders",
        channel="orders",
        messages=[
            {
                "payload": {"order": 1000 + n, "step": ("pay", "pack", "ship", "review")[n % 4]},
                "deliver_after": timedelta(seconds=delay),
                "headers": {"region": ("eu", "us", "apac")[n % 3]},
                "priority": n % 10,
            }
            for n, delay in enumerate(DELAYS)
        ],
    ).expand(delay_conn_id=find_connections())
