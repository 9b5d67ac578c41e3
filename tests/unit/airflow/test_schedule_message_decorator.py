"""``@task.schedule_message``."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker


def test_the_return_value_of_the_function_is_scheduled(broker: EmbeddedBroker, context: Any) -> None:
    with DAG("invoices", schedule=None):

        @task.schedule_message(channel="{{ params.channel }}", deliver_after=60, key="k")
        def remind(invoice: int, run_id: str | None = None) -> dict[str, Any]:
            return {"invoice": invoice, "run": run_id, "text": "{{ not a template }}"}

        operator = remind(7).operator
    context |= {"run_id": "run-1", "params": {"channel": "letters"}}
    operator.render_template_fields(context)
    message_id = operator.execute(context)

    with broker.ledger.read() as connection:
        stored = listing.get(connection, message_id).message
    assert (stored.channel, stored.key) == ("letters", "k")
    assert stored.payload == b'{"invoice":7,"run":"run-1","text":"{{ not a template }}"}'
    # Otherwise Airflow would take the id for a dict, as the function's annotation says.
    assert operator.multiple_outputs is False


def test_it_can_wait(broker: EmbeddedBroker, context: Any) -> None:
    with DAG("invoices", schedule=None):

        @task.schedule_message(channel="letters", deliver_after=60, wait_for_dispatch=True)
        def remind() -> str:
            return "x"

        operator = remind().operator
    with pytest.raises(TaskDeferred) as request:
        operator.execute(context)
    event = {"counts": {"dispatched": 1}, "outcomes": {}}
    assert [operator.execute_complete(context, event)] == request.value.trigger.message_ids


def test_the_payload_comes_from_the_function_only() -> None:
    def remind() -> str:
        return "x"

    with DAG("invoices", schedule=None):
        decorated = task.schedule_message(channel="letters", payload="y")(remind)
        with pytest.raises(TypeError, match="uses the return value of the function"):
            decorated()


def test_a_function_that_returns_nothing_schedules_nothing(broker: EmbeddedBroker, context: Any) -> None:
    """A forgotten return would send null."""
    with DAG("invoices", schedule=None):

        @task.schedule_message(channel="reminders", deliver_after=60)
        def remind() -> None:
            pass

        operator = remind().operator
    with pytest.raises(AirflowFailException, match=r"payload: remind\(\) returned nothing, and nothing is scheduled"):
        operator.execute(context)
    with broker.ledger.read() as connection:
        assert sum(listing.count_by_state(connection).values()) == 0
