"""RabbitMQ connections in a real Airflow: the broker holds the wait, and no process of ours is needed for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from uuid import uuid4

import pytest

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from tests.acceptance.external_brokers import press_button, receive, require_message_of_task
from tests.acceptance.runs import DEFERRED, Start
from tests.rabbits import config_of, connection_of, declare_queue, require_rabbitmq
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def url() -> str:
    return require_rabbitmq()


@pytest.fixture
def channel(url: str) -> str:
    """A queue of its own for each test."""
    name = f"acceptance-{uuid4().hex}"
    declare_queue(url, name, **{"x-queue-type": "quorum"})
    return name


@pytest.fixture
def rabbit(url: str) -> Iterator[RabbitMQBroker]:
    with RabbitMQBroker(config_of(url)) as opened:
        # A busy broker takes longer for it than the tests delay their messages.
        opened.create_topology()
        yield opened


def test_a_task_waits_for_a_message_that_rabbitmq_holds_with_no_dispatcher_running(
    start: Start, airflow: Airflow, api: AirflowApi, rabbit: RabbitMQBroker, channel: str
) -> None:
    """M1, A2, A5, A6"""
    airflow.dispatcher.kill()
    try:
        run = start("rabbitmq_waits", {"channel": channel, "seconds": 12})
        run.wait_for_task("wait", DEFERRED)
        airflow.wait_for(lambda: api.pool()["occupied_slots"] == 0, what="no worker slot is taken", seconds=60)
        run.wait()
        require_message_of_task(rabbit, channel, run, "wait")
    finally:
        airflow.dispatcher.start()


def test_a_retried_or_cleared_task_publishes_nothing_again_that_was_confirmed(
    start: Start, api: AirflowApi, rabbit: RabbitMQBroker, channel: str
) -> None:
    """A28: RabbitMQ knows no ids, so the task remembers the confirmed ones in Airflow's store."""
    run = start("rabbitmq_retried", {"channel": channel})
    run.wait()
    assert run.task("bulk")["try_number"] == 2
    ids = run.result("bulk")
    arrived = Counter(message.id for message in receive(rabbit, channel, 1500))
    assert arrived == Counter(ids)

    api.clear("rabbitmq_retried", run.run_id, "bulk")
    run.wait_for_task("bulk", frozenset({"queued", "running", "success"}))
    run.wait()
    assert run.task("bulk")["try_number"] == 3
    assert run.result("bulk") == ids
    assert rabbit.receive(channel) == []


def test_messages_for_rabbitmq_that_the_ledger_holds_can_be_called_off_and_hurried(
    start: Start, rabbit: RabbitMQBroker, channel: str
) -> None:
    """A5, A20"""
    run = start("rabbitmq_held_by_ledger", {"channel": channel})
    run.wait()
    [message] = receive(rabbit, channel, 1)
    assert (message.id, message.payload) == (run.result("hurried"), b"hurried")
    assert rabbit.receive(channel) == []


def test_the_example_runs(start: Start, rabbit: RabbitMQBroker, channel: str) -> None:
    start("example_rabbitmq", {"channel": channel}).wait()
    orders = [json.loads(message.payload)["order"] for message in receive(rabbit, channel, 4)]
    assert sorted(orders) == [0, 1, 2, 4711]


def test_impossible_requests_fail_the_task_with_the_remedy(start: Start, url: str) -> None:
    """A12"""
    run = start("rabbitmq_refused")
    run.wait("failed")
    assert "channel: queue 'no-such-queue' does not exist on RabbitMQ at" in run.log("no_queue")
    assert "the login of user 'guest' is refused; correct login and password" in run.log("wrong_password")
    assert "s3cret" not in run.log("wrong_password")
    assert "is held by RabbitMQ itself and cannot be cancelled" in run.log("no_recall")
    assert 'hold=\\\\\\"ledger' in run.log("no_recall") or 'hold=\\"ledger' in run.log("no_recall")


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        ({}, True, "RabbitMQ .* answers"),
        ({"password": "s3cret-but-wrong"}, False, "the login of user 'guest' is refused"),
        ({"port": 1}, False, "cannot be reached"),
    ],
)
def test_the_test_button_of_the_connection_form_reports_the_result(
    api: AirflowApi, url: str, change: dict[str, object], status: bool, sentence: str
) -> None:
    form = connection_of(url, connect_timeout=20) | change
    press_button(api, form, status=status, sentence=sentence)
