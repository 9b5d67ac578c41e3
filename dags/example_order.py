"""Schedule a message for each order, then wait for an answer in a channel and take it.

You can send the answer yourself: airflow delay send example.answers --payload '{"paid": true}'
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_delay_provider import MessageSensor, ScheduleMessageOperator

with DAG(
    dag_id="example_order",
    schedule=None,
    params={"seconds": Param(10, type="number", minimum=0, description="Delay of the messages.")},
    tags=["delay", "example"],
    doc_md=__doc__,
):

    @task
    def find_orders() -> list[dict[str, Any]]:
        return [{"order": number, "total": 10 * number} for number in range(1, 4)]

    # One task instance, and one message, for each order.
    notify_packing = ScheduleMessageOperator.partial(
        task_id="notify_packing", channel="example.packing", deliver_after="{{ params.seconds }}"
    ).expand(payload=find_orders())

    @task.schedule_message(channel="example.answers", deliver_after="{{ params.seconds }}")
    def answer_in_the_customers_name() -> dict[str, Any]:
        return {"paid": True}

    wait_for_answer = MessageSensor(task_id="wait_for_answer", channel="example.answers", timeout=600)

    @task
    def book(answer: dict[str, Any]) -> None:
        print(f"Answer {answer['id']}: {answer['payload']}")

    [notify_packing, answer_in_the_customers_name()] >> wait_for_answer
    book(wait_for_answer.output)
