"""What the acceptance tests let a real Airflow run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, get_current_context, task

from airflow_delay_provider import (
    CancelMessageOperator,
    DelayHook,
    MessageDispatchedSensor,
    MessageSensor,
    RescheduleMessageOperator,
    ScheduleMessageOperator,
)

HOUR = timedelta(hours=1)


class ScheduleThenFail(ScheduleMessageOperator):
    """Fails on its first try, after the messages were confirmed."""

    def execute(self, context: Any) -> Any:
        ids = super().execute(context)
        if context["ti"].try_number == 1:
            raise RuntimeError("lost after the confirmation")
        return ids


with DAG(dag_id="retried", schedule=None, default_args={"retries": 1, "retry_delay": timedelta(seconds=1)}):
    ScheduleThenFail(
        task_id="by_operator",
        channel="retried",
        messages=[{"payload": "now"}, {"payload": "later", "deliver_after": HOUR}],
    )

    @task
    def by_hook() -> str:
        ti = get_current_context()["ti"]
        hook = DelayHook()
        message = hook.compose("retried", "by hook", message_id=f"{ti.run_id}/by_hook")
        hook.schedule([message])
        hook.close()
        if ti.try_number == 1:
            raise RuntimeError("lost after the confirmation")
        return message.id

    by_hook()


with DAG(dag_id="controlled", schedule=None):
    wanted = ScheduleMessageOperator(task_id="wanted", channel="controlled", payload="wanted", deliver_after=HOUR)
    unwanted = ScheduleMessageOperator(task_id="unwanted", channel="controlled", payload="unwanted", deliver_after=HOUR)
    dispatched = MessageDispatchedSensor(task_id="dispatched", message_ids=wanted.output, timeout=600)
    gate = MessageSensor(task_id="gate", channel="gate", filter="tests.acceptance.filters.is_open", timeout=600)
    expedite = RescheduleMessageOperator(task_id="expedite", message_ids=wanted.output, expedite=True)
    cancel = CancelMessageOperator(task_id="cancel", message_ids=unwanted.output)
    gate >> [expedite, cancel]


with DAG(dag_id="many", schedule=None):
    ScheduleMessageOperator.partial(task_id="mapped", channel="mapped", deliver_after=1).expand(
        payload=[{"number": number} for number in range(10)]
    )

    @task.schedule_message(channel="decorated", headers={"made": "by a function"})
    def decorated() -> dict[str, str]:
        return {"text": "{{ not a template }}"}

    decorated()


with DAG(dag_id="short_waits", schedule=None):
    ScheduleMessageOperator.partial(task_id="wait", channel="short_waits", payload="x", wait_for_dispatch=True).expand(
        deliver_after=[1, 2, 3, 4, 5, 6]
    )


# A template, because a constant mistake is an import error.
with DAG(dag_id="bad_input", schedule=None, default_args={"retries": 3}, params={"deliver_at": "2030-01-01T00:00:00"}):
    ScheduleMessageOperator(task_id="no_zone", channel="bad", payload="x", deliver_at="{{ params.deliver_at }}")


with DAG(dag_id="killed", schedule=None):
    ScheduleMessageOperator(
        task_id="wait",
        channel="killed",
        payload="x",
        deliver_after=HOUR,
        wait_for_dispatch=True,
        cancel_on_kill=True,
    )


with DAG(dag_id="waiting", schedule=None):
    ScheduleMessageOperator(task_id="wait", channel="waiting", payload="x", deliver_after=HOUR, wait_for_dispatch=True)


for kind, conn_id in (("rabbitmq", "rabbitmq_default"), ("kafka", "delay_kafka_default")):
    with DAG(dag_id=f"{kind}_waits", schedule=None, params={"channel": "", "seconds": 12}):
        ScheduleMessageOperator(
            task_id="wait",
            delay_conn_id=conn_id,
            channel="{{ params.channel }}",
            payload={"run": "{{ run_id }}"},
            deliver_after="{{ params.seconds }}",
            wait_for_dispatch=True,
        )

    with DAG(
        dag_id=f"{kind}_retried",
        schedule=None,
        params={"channel": ""},
        default_args={"retries": 1, "retry_delay": timedelta(seconds=1)},
    ):
        ScheduleThenFail(
            task_id="bulk",
            delay_conn_id=conn_id,
            channel="{{ params.channel }}",
            messages=[{"payload": number, "deliver_after": 1} for number in range(1500)],
        )


with DAG(dag_id="rabbitmq_held_by_ledger", schedule=None, params={"channel": ""}):
    options: dict[str, Any] = {"delay_conn_id": "rabbitmq_default", "hold": "ledger"}
    held = {
        name: ScheduleMessageOperator(
            task_id=name, channel="{{ params.channel }}", payload=name, deliver_after=HOUR, **options
        )
        for name in ("called_off", "hurried")
    }
    CancelMessageOperator(task_id="cancel", message_ids=held["called_off"].output, **options)
    hurry = RescheduleMessageOperator(task_id="hurry", message_ids=held["hurried"].output, expedite=True, **options)
    hurry >> MessageDispatchedSensor(task_id="sent", message_ids=held["hurried"].output, timeout=600, **options)


with DAG(dag_id="rabbitmq_refused", schedule=None):
    ScheduleMessageOperator(
        task_id="no_queue", delay_conn_id="rabbitmq_default", channel="no-such-queue", payload="x", deliver_after=HOUR
    )
    ScheduleMessageOperator(
        task_id="wrong_password",
        delay_conn_id="rabbitmq_wrong_password",
        channel="any",
        payload="x",
        deliver_after=HOUR,
    )
    broker_held = ScheduleMessageOperator(
        task_id="broker_held", delay_conn_id="rabbitmq_default", channel="delay.v1.unroutable", payload="x"
    )
    CancelMessageOperator(task_id="no_recall", delay_conn_id="rabbitmq_default", message_ids=broker_held.output)


with DAG(dag_id="kafka_controlled", schedule=None, params={"channel": ""}):
    kafka: dict[str, Any] = {"delay_conn_id": "delay_kafka_default"}
    waiting = {
        name: ScheduleMessageOperator(
            task_id=name, channel="{{ params.channel }}", payload=name, deliver_after=HOUR, **kafka
        )
        for name in ("called_off", "hurried")
    }
    CancelMessageOperator(task_id="cancel", message_ids=waiting["called_off"].output, **kafka)
    hurry = RescheduleMessageOperator(task_id="hurry", message_ids=waiting["hurried"].output, expedite=True, **kafka)
    hurry >> MessageDispatchedSensor(task_id="sent", message_ids=waiting["hurried"].output, timeout=600, **kafka)


with DAG(dag_id="kafka_refused", schedule=None, params={"channel": ""}):
    ScheduleMessageOperator(
        task_id="no_topic",
        delay_conn_id="delay_kafka_default",
        channel="no-such-topic",
        payload="x",
        deliver_after=HOUR,
    )
    CancelMessageOperator(task_id="nobody", delay_conn_id="delay_kafka_default", message_ids="nobody")
