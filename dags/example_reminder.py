"""Schedule three reminders, and wait for a fourth without a worker slot.

Use another delay with {"seconds": 60}.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param, task

from airflow_delay_provider import ScheduleMessageOperator

with DAG(
    dag_id="example_reminder",
    schedule=None,
    params={"seconds": Param(15, type="number", minimum=0, description="Delay of the first reminder.")},
    tags=["delay", "example"],
    doc_md=__doc__,
):
    # Schedules all three or none. Each has its own delay; they share the other fields.
    remind_later = ScheduleMessageOperator(
        task_id="remind_later",
        channel="reminders",
        headers={"run": "{{ run_id }}"},
        messages=[
            {"payload": "Stand-up in the small room", "deliver_after": "{{ params.seconds }}"},
            {"payload": "Lunch", "deliver_after": "{{ params.seconds + 2 }}"},
            {"payload": {"invoice": 4711, "reminder": 1}, "deliver_after": "{{ params.seconds + 4 }}"},
        ],
    )

    # Deferred until its message is in the channel, without a worker slot.
    remind_and_wait = ScheduleMessageOperator(
        task_id="remind_and_wait",
        channel="reminders",
        payload="Go home",
        headers={"run": "{{ run_id }}"},
        deliver_after="{{ params.seconds + 5 }}",
        wait_for_dispatch=True,
    )

    @task
    def go_home(message_id: str) -> None:
        """Run right after the reminder has arrived."""
        print(f"Reminder {message_id} has arrived.")

    go_home(remind_and_wait.output)
