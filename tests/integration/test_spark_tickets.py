"""The tickets of a Spark task over RabbitMQ and Kafka, with a program of ours as spark-submit and the real trigger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import NoRecallError
from airflow_delay_provider.hooks.delay import DelayHook, open_destination
from airflow_delay_provider.operators.spark import SparkSubmitRetryOperator
from airflow_delay_provider.spark.retries import SparkRetries
from airflow_delay_provider.testing.task_run import TaskInstanceStub
from airflow_delay_provider.triggers.spark import RetryTicketTrigger
from tests.integration import kafka_with_dispatcher
from tests.rabbits import config_of, connection_of, declare_queue, fresh_vhost
from tests.unit.airflow.submitting import REFUSED, SparkSubmit, TaskStateStore

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
RABBIT = "rabbit"


@dataclass(frozen=True)
class Way:
    """Over which broker tickets go."""

    conn_id: str
    channel: str
    hold: str | None = None


@pytest.fixture(params=["rabbitmq", "rabbitmq held by the ledger", "kafka"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """Each broker, with what dispatches its messages."""
    ledger_url = f"sqlite:///{tmp_path / 'ledger.db'}"
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", ledger_url)
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "local[1]"}))
    if request.param == "kafka":
        with kafka_with_dispatcher.stream_with_dispatcher(ledger_url) as stream:
            yield Way(kafka_with_dispatcher.CONN_ID, stream.topic())
        return
    with fresh_vhost() as url:
        monkeypatch.setenv(f"AIRFLOW_CONN_{RABBIT.upper()}", json.dumps(connection_of(url)))
        channel = f"retries-{uuid4().hex}"
        declare_queue(url, channel)
        with RabbitMQBroker(config_of(url)) as broker:
            broker.create_topology([channel])
        dispatcher = Dispatcher(
            Ledger(ledger_url), open_broker=open_destination, config=DispatcherConfig(health_port=None)
        )
        dispatcher.start()
        yield Way(RABBIT, channel, hold="ledger" if "ledger" in request.param else None)
        dispatcher.stop()


class Task:
    """A task whose job fails once."""

    def __init__(self, way: Way, folder: Path, *, delay: timedelta) -> None:
        self.way = way
        self.program = SparkSubmit(folder / "program", REFUSED)
        self._retries = SparkRetries(backoff=Backoff(initial=delay, floor=delay, cap=delay))
        ti = TaskInstanceStub(dag_id="sales", task_id="load", run_id=uuid4().hex, map_index=-1, results={}, max_tries=1)
        self._context: Any = {"ti": ti, "task_state_store": TaskStateStore()}

    def begin(self) -> RetryTicketTrigger:
        with pytest.raises(TaskDeferred) as deferred:
            self._operator().execute(self._context)
        _, arguments = deferred.value.trigger.serialize()
        return RetryTicketTrigger(**json.loads(json.dumps(arguments)))

    def resume(self, event: dict[str, Any]) -> None:
        self._operator().resume(self._context, event)

    def _operator(self) -> SparkSubmitRetryOperator:
        return SparkSubmitRetryOperator(
            task_id="load",
            application="job.py",
            spark_binary=self.program.path,
            spark_retries=self._retries,
            delay_conn_id=self.way.conn_id,
            hold=self.way.hold,
            ticket_channel=self.way.channel,
            retries=1,
        )


async def fire(trigger: RetryTicketTrigger) -> dict[str, Any]:
    """Return the event with which the task is resumed."""
    event: dict[str, Any] = (await asyncio.wait_for(anext(trigger.run()), 90)).payload
    return event


def test_a_job_that_failed_comes_back_by_its_ticket_over_each_broker(way: Way, tmp_path: Path) -> None:
    task = Task(way, tmp_path, delay=2 * SECOND)
    event = asyncio.run(fire(task.begin()))
    assert event["outcome"] == "go"
    task.resume(event)
    assert task.program.submissions == 2
    with closing(DelayHook(way.conn_id, hold=way.hold)) as hook:
        assert hook.get_conn().peek(way.channel) == [], "who comes back takes its ticket out of the channel"


def test_a_ticket_can_be_expedited_and_given_up_where_the_broker_gives_it_back(way: Way, tmp_path: Path) -> None:
    expedited, given_up = (Task(way, tmp_path / name, delay=HOUR) for name in ("a", "b"))
    triggers = expedited.begin(), given_up.begin()
    with closing(DelayHook(way.conn_id, hold=way.hold)) as hook:
        broker = hook.get_conn()
        if not broker.can_recall:
            with pytest.raises(NoRecallError, match="hold"):
                broker.expedite([triggers[0]._current.id])
            return
        broker.expedite([triggers[0]._current.id])
        broker.cancel([triggers[1]._current.id])
    expedited.resume(asyncio.run(fire(triggers[0])))
    assert expedited.program.submissions == 2
    with pytest.raises(AirflowFailException, match="it was given up"):
        given_up.resume(asyncio.run(fire(triggers[1])))
    assert given_up.program.submissions == 1
