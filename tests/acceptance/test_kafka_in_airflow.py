"""Kafka connections in a real Airflow: messages wait in topics, and a dispatcher with ``--kafka`` moves them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.domain.arguments import compose_message
from airflow_delay_provider.domain.exceptions import MessagesWaitError
from tests.acceptance.external_brokers import press_button, receive, require_message_of_task
from tests.acceptance.runs import DEFERRED, Start
from tests.acceptance.test_spark_retries import define
from tests.given import do_without
from tests.kafkas import connection_of, fresh_topic, require_kafka
from tests.sparks import running_with
from tools.servers.airflow import Airflow
from tools.servers.airflow_api import AirflowApi
from tools.servers.component import Component, stop_all, wait_for
from tools.servers.process import free_port
from tools.servers.server import UnavailableError
from tools.servers.sessions import Guardian
from tools.servers.spark import find_kafka_connector

pytestmark = pytest.mark.timeout(600)

CONN_ID = "delay_kafka_default"
#: A JVM may have to start on a busy machine.
SPARK_SECONDS = 400
#: A form stores the fields that were left empty, too.
EMPTY_FIELDS = {"hold": "broker", "ledger_url": None, "security.protocol": None, "ssl.ca.location": None}


@pytest.fixture(scope="module")
def bootstrap() -> str:
    return require_kafka()


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"ladder": f"acceptance-{uuid4().hex[:8]}", "partitions": 2, **EMPTY_FIELDS}


@pytest.fixture(scope="module")
def kafka(bootstrap: str, settings: dict[str, Any]) -> Iterator[KafkaBroker]:
    """A client beside Airflow; in the end the ladder is deleted."""
    with KafkaBroker(KafkaConfig.from_settings(settings, host=bootstrap)) as opened:
        yield opened

        def deleted() -> bool:
            try:
                return bool(opened.delete_topology(even_if_messages_wait=True))
            except MessagesWaitError:
                # A dispatcher with a name counts as there for some seconds after it has ended.
                return False

        wait_for(deleted, what="the ladder is deleted", seconds=60, interval=1)


@pytest.fixture(scope="module")
def connection(api: AirflowApi, bootstrap: str, settings: dict[str, Any]) -> str:
    """The connection in Airflow's database, as the form stores it."""
    form = connection_of(bootstrap, **settings)
    body = form | {"connection_id": CONN_ID, "extra": json.dumps(form["extra"])}
    assert api.http.post("/api/v2/connections", json=body).is_success
    return CONN_ID


@pytest.fixture(scope="module")
def dispatcher(airflow: Airflow, kafka: KafkaBroker, connection: str) -> Iterator[Component]:
    """A dispatcher beside Airflow's own, for Kafka."""
    command = [sys.executable, "-m", "airflow_delay_provider.dispatcher", "--ledger", airflow.ledger_url]
    command += ["--kafka", connection, "--index", connection, "--instance", "acceptance", "--health-port", "-1"]
    guardian = Guardian()
    component = Component("kafka-dispatcher", command, log_dir=airflow.log_dir, env=airflow.env(), guardian=guardian)
    component.start()
    try:
        yield component
        component.require_alive()
    finally:
        stop_all([component])
        guardian.stop()


@pytest.fixture
def channel(bootstrap: str, dispatcher: Component) -> str:
    """A topic of its own for each test, and a dispatcher."""
    return fresh_topic(bootstrap, partitions=2)


def test_a_task_waits_for_a_message_that_kafka_holds(
    start: Start, airflow: Airflow, api: AirflowApi, kafka: KafkaBroker, channel: str
) -> None:
    """A2, A5, A6"""
    run = start("kafka_waits", {"channel": channel, "seconds": 12})
    run.wait_for_task("wait", DEFERRED)
    airflow.wait_for(lambda: api.pool()["occupied_slots"] == 0, what="no worker slot is taken", seconds=60)
    run.wait()
    require_message_of_task(kafka, channel, run, "wait")


def test_a_task_waits_on_while_no_dispatcher_runs(
    start: Start, kafka: KafkaBroker, channel: str, dispatcher: Component
) -> None:
    """A44: killed with -9, and started again under its name."""
    run = start("kafka_waits", {"channel": channel, "seconds": 14})
    run.wait_for_task("wait", DEFERRED)
    dispatcher.kill()
    dispatcher.start()
    run.wait()
    assert [message.id for message in receive(kafka, channel, 1)] == [run.result("wait")]
    assert kafka.receive(channel) == []


def test_a_retried_task_publishes_nothing_again_that_was_confirmed(
    start: Start, kafka: KafkaBroker, channel: str
) -> None:
    """A28: Kafka knows no ids, so the task remembers the confirmed ones."""
    run = start("kafka_retried", {"channel": channel})
    run.wait()
    assert run.task("bulk")["try_number"] == 2
    arrived = Counter(message.id for message in receive(kafka, channel, 1500))
    assert arrived == Counter(run.result("bulk"))
    assert kafka.receive(channel) == []


def test_messages_that_kafka_holds_are_called_off_and_hurried(start: Start, kafka: KafkaBroker, channel: str) -> None:
    """A5, A20"""
    run = start("kafka_controlled", {"channel": channel})
    run.wait()
    [message] = receive(kafka, channel, 1)
    assert (message.id, message.payload) == (run.result("hurried"), b"hurried")
    assert kafka.receive(channel) == []


def test_the_example_runs(start: Start, kafka: KafkaBroker, channel: str) -> None:
    start("example_kafka", {"channel": channel}).wait()
    orders = [json.loads(message.payload)["order"] for message in receive(kafka, channel, 4)]
    assert sorted(orders) == [0, 1, 2, 4711]


def test_impossible_requests_fail_the_task_with_the_remedy(start: Start, channel: str) -> None:
    """A12"""
    run = start("kafka_refused", {"channel": channel})
    run.wait("failed")
    assert "has no topic 'no-such-topic'; create it, or correct the name" in run.log("no_topic")
    assert "message 'nobody' is not known" in run.log("nobody")


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        ({}, True, "Kafka at .*: answers; the ladder delay.v1.acceptance-.* is "),
        ({"host": "", "extra": {}}, False, "bootstrap.servers: is not given"),
        ({"host": "localhost", "login": "me", "password": "s3cret-but-useless"}, False, "cannot be reached|TLS failed"),
    ],
    ids=["right", "empty", "no server"],
)
def test_the_test_button_of_the_connection_form_reports_the_result(
    api: AirflowApi, bootstrap: str, settings: dict[str, Any], change: dict[str, Any], status: bool, sentence: str
) -> None:
    """A12"""
    form = connection_of(bootstrap, **settings) | {"port": free_port()} | change
    press_button(api, form, status=status, sentence=sentence)


@pytest.mark.timeout(1200)
def test_a_dispatcher_on_spark_takes_the_place_of_the_plain_one_and_gives_it_back(
    start: Start,
    api: AirflowApi,
    kafka: KafkaBroker,
    channel: str,
    dispatcher: Component,
    tmp_path: Path,
) -> None:
    """The last test of this module: it stops and starts the dispatcher of all of them."""
    define(api, "spark_local", {"conn_type": "spark", "host": "local[1]"})
    try:
        jars = find_kafka_connector()[0].parent
    except UnavailableError as missing:
        do_without(str(missing))
    params = {"checkpoint": str(tmp_path / "checkpoint"), "jars": str(jars)}
    stop_all([dispatcher])
    try:
        run = start("example_streaming_dispatch", params)
        kafka.schedule([compose_message(channel, "by Spark", deliver_after=5, now=kafka.clock.now())])
        [message] = receive(kafka, channel, 1, seconds=SPARK_SECONDS)
        assert message.payload == b"by Spark"
        api.mark(run.dag_id, run.run_id, "dispatch", "failed")
        wait_for(lambda: running_with(str(tmp_path)) == [], what="nothing of the job is left", seconds=SPARK_SECONDS)
        back = start("example_streaming_dispatch", {**params, "release": True})
        assert api.wait_for_run(back.dag_id, back.run_id, seconds=SPARK_SECONDS) == "success", back.log("dispatch")
    finally:
        dispatcher.start()
    kafka.schedule([compose_message(channel, "again", deliver_after=1, now=kafka.clock.now())])
    [message] = receive(kafka, channel, 1, seconds=SPARK_SECONDS)
    assert message.payload == b"again"
