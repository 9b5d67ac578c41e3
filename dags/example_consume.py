"""Handle the messages of a channel: what cannot be done yet comes again later, what cannot be done at all is set aside.

The job that defers itself comes back after a second through the dispatcher; nobody blocks for it.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_delay_provider.domain.message import Message, decode_payload
from airflow_delay_provider.exceptions import DeferMessage
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.operators.message import ScheduleMessageOperator

with DAG(dag_id="example_consume", schedule=None, tags=["delay", "example"], doc_md=__doc__):
    send_jobs = ScheduleMessageOperator(
        task_id="send_jobs",
        channel="example.jobs",
        messages=[
            {"payload": {"print": "invoice"}},
            {"payload": {"print": "poster"}, "headers": {"printer": "cold"}},
            {"payload": {"burn": "disc"}},
        ],
    )

    @task
    def print_jobs() -> dict[str, int]:
        def handle(message: Message) -> None:
            job = decode_payload(message.payload, message.content_type)
            if message.headers.get("printer") == "cold" and message.handled_count == 0:
                raise DeferMessage(1, "the printer is warming up")
            # A KeyError: this job goes to the dead-letter channel with the reason.
            print(f"printed the {job['print']}")

        # Two are printed, one is deferred on its way, one is set aside: four settled in all.
        consumed = DelayHook().consume("example.jobs", handle, limit=4, timeout=timedelta(seconds=60))
        return {"printed": consumed.handled, "deferred": consumed.deferred, "set aside": consumed.dead_lettered}

    send_jobs >> print_jobs()
