"""Orders on Kafka: messages wait in topics of Kafka, and a dispatcher moves each to its own topic when it is due.

It needs a connection ``delay_kafka_default`` of type delay_kafka, the topic that messages go to, and
``airflow delay dispatcher --climb delay_kafka_default``. Start it with another topic: {"channel": "reviews"}
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_delay_provider.operators.message import CancelMessageOperator, ScheduleMessageOperator

with DAG(
    dag_id="example_kafka",
    schedule=None,
    params={"channel": Param("orders", type="string", description="A topic.")},
    default_args={"delay_conn_id": "delay_kafka_default"},
    tags=["delay", "example", "kafka"],
    doc_md=__doc__,
):
    # Confirmed by all replicas before the task succeeds; a task that is tried again publishes nothing twice.
    ScheduleMessageOperator(
        task_id="ask_for_reviews",
        channel="{{ params.channel }}",
        messages=[{"payload": {"order": order}, "deliver_after": timedelta(seconds=5)} for order in range(3)],
    )

    # Deferred until a dispatcher has passed it on; the journal, a topic too, tells the triggerer.
    ScheduleMessageOperator(
        task_id="wait_for_payment",
        channel="{{ params.channel }}",
        payload={"order": 4711, "check": "payment"},
        deliver_after=timedelta(seconds=12),
        wait_for_dispatch=True,
    )

    # What waits in Kafka can be called off until it is due.
    remind = ScheduleMessageOperator(
        task_id="remind_in_a_month",
        channel="{{ params.channel }}",
        payload={"order": 4711, "reminder": 1},
        deliver_after=timedelta(days=30),
    )
    CancelMessageOperator(task_id="paid_meanwhile", message_ids=remind.output)
