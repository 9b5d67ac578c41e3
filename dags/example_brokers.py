"""Orders on RabbitMQ and on Kafka: one DAG for each broker, with the same tasks.

Define the connection ``rabbitmq_default`` (type rabbitmq) or ``delay_kafka_default`` (type delay_kafka), and create the
queue or topic that receives the messages. RabbitMQ delays messages itself. Kafka needs a dispatcher:
``airflow delay dispatcher --kafka delay_kafka_default``. Use another channel with ``{"channel": "reviews"}``; for
RabbitMQ it can be an exchange, too: ``{"channel": "shop:orders.paid"}``.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_delay_provider import CancelMessageOperator, ScheduleMessageOperator

# Kafka can cancel a waiting message. RabbitMQ cannot, so messages that you may cancel wait in the ledger.
for broker, conn_id, hold in (("rabbitmq", "rabbitmq_default", "ledger"), ("kafka", "delay_kafka_default", "broker")):
    with DAG(
        dag_id=f"example_{broker}",
        schedule=None,
        params={"channel": Param("orders", type="string", description="Queue, exchange:routing.key or topic.")},
        default_args={"delay_conn_id": conn_id},
        tags=["delay", "example", broker],
        doc_md=__doc__,
    ):
        # The broker confirms the messages before the task succeeds. A retry publishes nothing twice.
        ScheduleMessageOperator(
            task_id="ask_for_reviews",
            channel="{{ params.channel }}",
            messages=[{"payload": {"order": order}, "deliver_after": timedelta(seconds=5)} for order in range(3)],
        )

        # Deferred until the message is in its channel. The triggerer reads that in the broker's journal.
        ScheduleMessageOperator(
            task_id="wait_for_payment",
            channel="{{ params.channel }}",
            payload={"order": 4711, "check": "payment"},
            deliver_after=timedelta(seconds=12),
            wait_for_dispatch=True,
        )

        remind = ScheduleMessageOperator(
            task_id="remind_in_a_month",
            channel="{{ params.channel }}",
            payload={"order": 4711, "reminder": 1},
            deliver_after=timedelta(days=30),
            hold=hold,
        )
        CancelMessageOperator(task_id="paid_meanwhile", message_ids=remind.output, hold=hold)
