"""Consume the messages of a channel: defer the ones that cannot be handled yet, and dead-letter the broken ones.

A deferred message comes back after its delay, and no process waits for it meanwhile.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_delay_provider import DeferMessage, DelayHook, Message, ScheduleMessageOperator, decode_payload

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
            # The third job raises a KeyError here, so it goes to the dead-letter channel.
            print(f"printed the {job['print']}")

        # Four in all: two messages are printed, one of them after it was deferred, and one is dead-lettered.
        consumed = DelayHook().consume("example.jobs", handle, limit=4, timeout=timedelta(seconds=60))
        return {"printed": consumed.handled, "deferred": consumed.deferred, "set aside": consumed.dead_lettered}

    send_jobs >> print_jobs()
