"""Announce each day's figures at nine the next morning, whenever the DAG runs.

The due time follows from the dates of the run. A backfill gets due times in the past, so its messages are sent at once.
"""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG, task

from airflow_delay_provider import MessageDispatchedSensor, ScheduleMessageOperator

with DAG(
    dag_id="example_delayed_message",
    schedule="@daily",
    start_date=datetime(2025, 1, 1, tzinfo=UTC),
    catchup=False,
    tags=["delay", "example"],
    doc_md=__doc__,
):

    @task
    def compute_figures() -> dict[str, int]:
        return {"orders": 12, "returns": 3}

    # If the task runs again, it schedules nothing twice: the message id depends on the run and the task.
    announce = ScheduleMessageOperator(
        task_id="announce",
        channel="example.figures",
        payload=compute_figures(),
        key="{{ dag.dag_id }}",
        headers={"day": "{{ data_interval_start | ds }}"},
        deliver_at="{{ data_interval_end + macros.timedelta(hours=9) }}",
    )

    # Deferred overnight, without a worker slot.
    announced = MessageDispatchedSensor(task_id="announced", message_ids=announce.output, timeout=24 * 60 * 60)

    @task
    def close_the_day(message_id: str) -> None:
        print(f"The figures were announced with message {message_id}.")

    announced >> close_the_day(announce.output)
