"""Change scheduled messages: cancel one, postpone and expedite another, then wait until it is dispatched."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_delay_provider import (
    CancelMessageOperator,
    MessageDispatchedSensor,
    RescheduleMessageOperator,
    ScheduleMessageOperator,
)

with DAG(dag_id="example_control", schedule=None, tags=["delay", "example"], doc_md=__doc__):
    chase_payment = ScheduleMessageOperator(
        task_id="chase_payment",
        channel="payments",
        payload={"invoice": 4711, "action": "chase"},
        deliver_after=timedelta(days=14),
    )
    # The invoice was paid in time.
    call_off = CancelMessageOperator(task_id="call_off", message_ids=chase_payment.output)

    thank = ScheduleMessageOperator(
        task_id="thank",
        channel="payments",
        payload={"invoice": 4711, "action": "thank"},
        deliver_after=timedelta(days=1),
    )
    postpone = RescheduleMessageOperator(task_id="postpone", message_ids=thank.output, deliver_after=timedelta(days=2))
    thank_now = RescheduleMessageOperator(task_id="thank_now", message_ids=postpone.output, expedite=True)
    thanked = MessageDispatchedSensor(task_id="thanked", message_ids=thank_now.output, timeout=300)

    call_off >> thank >> postpone >> thank_now >> thanked
