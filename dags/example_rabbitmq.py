"""Orders on RabbitMQ: the broker itself holds each message until it is due, with no plugin and no process of ours.

It needs a connection ``rabbitmq_default`` of type rabbitmq, and the queue that messages go to. Start it with another
queue, or with exchange:routing.key: {"channel": "shop:orders.paid"}
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_delay_provider.operators.message import CancelMessageOperator, ScheduleMessageOperator

with DAG(
    dag_id="example_rabbitmq",
    schedule=None,
    params={"channel": Param("orders", type="string", description="A queue, or exchange:routing.key.")},
    default_args={"delay_conn_id": "rabbitmq_default"},
    tags=["delay", "example", "rabbitmq"],
    doc_md=__doc__,
):
    # Confirmed by the broker before the task succeeds; a task that is tried again publishes nothing twice.
    ScheduleMessageOperator(
        task_id="ask_for_reviews",
        channel="{{ params.channel }}",
        messages=[{"payload": {"order": order}, "deliver_after": timedelta(seconds=5)} for order in range(3)],
    )

    # Deferred until RabbitMQ has passed it on; the journal, a stream on the broker, tells the triggerer.
    ScheduleMessageOperator(
        task_id="wait_for_payment",
        channel="{{ params.channel }}",
        payload={"order": 4711, "check": "payment"},
        deliver_after=timedelta(seconds=12),
        wait_for_dispatch=True,
    )

    # What may have to be called off waits in the ledger; the dispatcher sends it to RabbitMQ when it is due.
    remind = ScheduleMessageOperator(
        task_id="remind_in_a_month",
        channel="{{ params.channel }}",
        payload={"order": 4711, "reminder": 1},
        deliver_after=timedelta(days=30),
        hold="ledger",
    )
    CancelMessageOperator(task_id="paid_meanwhile", message_ids=remind.output, hold="ledger")
