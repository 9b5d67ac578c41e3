"""Sensors that wait on RabbitMQ, whose queues show messages only to consumers that take them, and do no harm."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pika
import pytest
from airflow.sdk.exceptions import TaskDeferred

from airflow_delay_provider.brokers.rabbitmq import shared_consumer
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, UnknownChannelError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.sensors.message import MessageSensor
from airflow_delay_provider.triggers import channel_watch
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from airflow_delay_provider.triggers.message import ChannelTrigger
from tests.integration.running_triggers import is_blue, is_red, never, path_of, waiting
from tests.rabbits import config_of, connection_of, declare_queue, require_rabbitmq
from tests.waiting import until
from tools.servers.component import wait_for

#: RabbitMQ 4's default; 3.10 has none.
DELIVERY_LIMIT = 20


def breaks(_message: Message) -> bool:
    raise ZeroDivisionError("the filter is wrong")


@pytest.fixture
def url(rabbitmq_version: str, monkeypatch: pytest.MonkeyPatch) -> str:
    url = require_rabbitmq()
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection_of(url)))
    return url


class RawClient:
    """Another program on the same broker."""

    def __init__(self, url: str) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(f"{url}?heartbeat=0"))
        self.channel = self._connection.channel()
        self.channel.confirm_delivery()
        self.pushed: list[tuple[str, int]] = []

    def fresh_queue(self, rabbitmq_version: str) -> str:
        """A quorum queue that drops messages after too many deliveries."""
        name = f"sensors-{uuid4().hex}"
        limit = {} if rabbitmq_version == "rabbitmq4" else {"x-delivery-limit": DELIVERY_LIMIT}
        self.channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum", **limit})
        return name

    def publish(self, queue: str, *payloads: str) -> list[str]:
        ids = [f"{position}-{uuid4().hex[:8]}" for position, _ in enumerate(payloads)]
        for message_id, payload in zip(ids, payloads, strict=True):
            properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
            self.channel.basic_publish("", queue, payload.encode(), properties)
        return ids

    def ready(self, queue: str) -> int:
        return int(self.channel.queue_declare(queue, passive=True).method.message_count)

    def get(self, queue: str) -> list[tuple[str, int]]:
        """Take all messages: the id and the delivery count of each."""
        taken = []
        while (answer := self.channel.basic_get(queue, auto_ack=True))[0] is not None:
            taken.append(_id_and_count(answer[1]))
        return taken

    def get_all(self, queue: str, n: int, *, seconds: float = 20) -> list[tuple[str, int]]:
        taken: list[tuple[str, int]] = []
        wait_for(lambda: len(taken.__iadd__(self.get(queue))) >= n, what=f"{n} messages of {queue}", seconds=seconds)
        return taken

    def consume(self, queue: str) -> None:
        self.channel.basic_consume(
            queue, lambda _channel, _method, properties, _body: self.pushed.append(_id_and_count(properties)), True
        )

    def serve(self) -> None:
        self._connection.process_data_events(0)

    def close(self) -> None:
        self._connection.close()


def _id_and_count(properties: pika.BasicProperties) -> tuple[str, int]:
    return str(properties.message_id), int((properties.headers or {}).get("x-delivery-count", 0))


@pytest.fixture
def client(url: str) -> Iterator[RawClient]:
    client = RawClient(url)
    yield client
    client.close()


@pytest.fixture
def queue(client: RawClient, rabbitmq_version: str) -> Iterator[str]:
    name = client.fresh_queue(rabbitmq_version)
    yield name
    client.channel.queue_delete(name)


def trigger(queue: str, passes: Callable[[Message], bool] | None, **options: Any) -> ChannelTrigger:
    filter = None if passes is None else path_of(passes)
    return ChannelTrigger(channel=queue, delay_conn_id="rabbit", filter=filter, **options)


async def test_sensors_whose_filters_match_nothing_harm_no_message(client: RawClient, queue: str) -> None:
    """Looks twice a second lost all of them within 14 s."""
    ids = client.publish(queue, *("green" for _ in range(5)))
    async with waiting(*(trigger(queue, never) for _ in range(3))):
        await asyncio.sleep(14)
    assert [message_id for message_id, _ in client.get_all(queue, 5)] == ids


async def test_a_wait_counts_at_most_one_delivery(client: RawClient, queue: str, rabbitmq_version: str) -> None:
    client.publish(queue, *("green" for _ in range(5)))
    async with waiting(trigger(queue, never)):
        await until(lambda: client.ready(queue) == 0)
        await until(lambda: client.ready(queue) == (5 if rabbitmq_version == "rabbitmq4" else 0))
    counts = [count for _, count in client.get_all(queue, 5)]
    assert counts == [0 if rabbitmq_version == "rabbitmq4" else 1] * 5


async def test_other_consumers_get_everything_beyond_the_bound_at_once(client: RawClient, queue: str) -> None:
    ids = client.publish(queue, *("green" for _ in range(30)))
    async with waiting(trigger(queue, never, look_ahead=20)):
        await until(lambda: client.ready(queue) == 10)
        taken = client.get(queue)
        assert {message_id for message_id, _ in taken} <= set(ids)
        assert len(taken) >= 10


async def test_a_consumer_that_is_free_is_served_before_sensors(client: RawClient, queue: str) -> None:
    client.consume(queue)
    async with waiting(trigger(queue, None)) as (sensor,):
        await until(lambda: BrokerThread._running)
        await until(lambda: client.channel.queue_declare(queue, passive=True).method.consumer_count == 2)
        ids = client.publish(queue, *("green" for _ in range(5)))
        await until(lambda: client.serve() or len(client.pushed) == 5)
        assert [message_id for message_id, _ in client.pushed] == ids
        assert not sensor.done()


async def test_messages_that_match_no_filter_go_to_another_consumer_where_a_requeue_counts_nothing(
    client: RawClient, queue: str, rabbitmq_version: str
) -> None:
    if rabbitmq_version != "rabbitmq4":
        pytest.skip("giving back counts a delivery here, so messages are held while sensors wait")
    ids = client.publish(queue, *("green" for _ in range(5)))
    async with waiting(trigger(queue, never)):
        await until(lambda: client.ready(queue) == 0)
        client.consume(queue)
        await until(lambda: client.serve() or len(client.pushed) == 5)
    assert client.pushed == [(message_id, 0) for message_id in ids]


async def test_each_of_two_sensors_takes_its_own_message_and_the_others_stay(
    client: RawClient, queue: str, rabbitmq_version: str
) -> None:
    ids = client.publish(queue, "green", "red", "green", "blue")
    async with waiting(trigger(queue, is_red), trigger(queue, is_blue), trigger(queue, never)) as (red, blue, _):
        assert (await asyncio.wait_for(red, 20))["message_id"] == ids[1]
        assert (await asyncio.wait_for(blue, 20))["message_id"] == ids[3]
        # The workers consume one after the other; the other messages are held meanwhile.
        assert (await taken_by_worker(queue, is_blue, ids[3]))["payload"] is not None
        assert (await taken_by_worker(queue, is_red, ids[1]))["id"] == ids[1]
    left = client.get_all(queue, 2)
    assert [message_id for message_id, _ in left] == [ids[0], ids[2]]
    assert max(count for _, count in left) <= (0 if rabbitmq_version == "rabbitmq4" else 1)


async def taken_by_worker(queue: str, passes: Callable[[Message], bool], message_id: str) -> Any:
    sensor = MessageSensor(task_id="wait", channel=queue, delay_conn_id="rabbit", filter=path_of(passes), timeout=60)
    event = {"message_id": message_id, "give_up_at": "2100-01-01T00:00:00+00:00"}
    return await asyncio.wait_for(asyncio.to_thread(sensor.execute_complete, {}, event), 30)


async def test_a_message_wakes_one_sensor_only(client: RawClient, queue: str) -> None:
    async with waiting(*(trigger(queue, is_red) for _ in range(3)), trigger(queue, None)) as sensors:
        await until(lambda: BrokerThread._running)
        [message_id] = client.publish(queue, "red")
        done, _ = await asyncio.wait(sensors, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        await asyncio.sleep(1.5)
        assert [task.result()["message_id"] for task in sensors if task.done()] == [message_id]
        assert len(done) == 1


async def test_a_message_is_kept_for_its_task_when_no_other_sensor_waits(
    client: RawClient, queue: str, rabbitmq_version: str
) -> None:
    ids = client.publish(queue, "green", "red")
    async with waiting(trigger(queue, is_red)) as (sensor,):
        assert (await asyncio.wait_for(sensor, 20))["message_id"] == ids[1]
        assert (await taken_by_worker(queue, is_red, ids[1]))["id"] == ids[1]
        await until(lambda: not BrokerThread._running)
        left = client.get_all(queue, 1)
    assert left == [(ids[0], 0 if rabbitmq_version == "rabbitmq4" else 1)]


def test_a_task_whose_triggerer_has_ended_takes_the_message_from_the_queue(client: RawClient, queue: str) -> None:
    ids = client.publish(queue, "green", "red", "green")
    assert asyncio.run(taken_by_worker(queue, is_red, ids[1]))["id"] == ids[1]
    assert [message_id for message_id, _ in client.get_all(queue, 2)] == [ids[0], ids[2]]


def test_a_task_that_finds_nothing_waits_on(client: RawClient, queue: str) -> None:
    client.publish(queue, "green")
    with pytest.raises(TaskDeferred):
        asyncio.run(taken_by_worker(queue, is_red, "gone"))
    assert len(client.get_all(queue, 1)) == 1


async def test_a_deleted_channel_holds_up_its_own_sensors_only(
    client: RawClient,
    url: str,
    rabbitmq_version: str,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(BrokerThread, "outage", Backoff(**dict.fromkeys(("initial", "cap", "floor"), Backoff().floor)))
    doomed = client.fresh_queue(rabbitmq_version)
    client.publish(doomed, "green")
    async with waiting(trigger(doomed, is_red), trigger(queue, is_red)) as (waits_on, healthy):
        await until(lambda: client.ready(doomed) == 0)
        client.channel.queue_delete(doomed)
        await until(lambda: f"cannot consume channel {doomed}" in caplog.text)
        [message_id] = client.publish(queue, "red")
        assert (await asyncio.wait_for(healthy, 20))["message_id"] == message_id
        assert not waits_on.done()
        declare_queue(url, doomed, **{"x-queue-type": "quorum"})
        [again] = client.publish(doomed, "red")
        assert (await asyncio.wait_for(waits_on, 20))["message_id"] == again
    client.channel.queue_delete(doomed)


async def test_a_channel_that_never_existed_fails_its_own_sensors_only(client: RawClient, queue: str) -> None:
    async with waiting(trigger("no-such-queue", is_red), trigger(queue, is_red)) as (mistaken, healthy):
        with pytest.raises(UnknownChannelError, match="queue 'no-such-queue' does not exist"):
            await asyncio.wait_for(mistaken, 20)
        [message_id] = client.publish(queue, "red")
        assert (await asyncio.wait_for(healthy, 20))["message_id"] == message_id


async def test_a_filter_that_fails_ends_its_own_sensor_only(client: RawClient, queue: str) -> None:
    ids = client.publish(queue, "green", "red")
    async with waiting(trigger(queue, breaks), trigger(queue, is_red)) as (broken, healthy):
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(broken, 20)
        assert (await asyncio.wait_for(healthy, 20))["message_id"] == ids[1]


async def test_large_messages_are_held_up_to_a_number_of_bytes(
    client: RawClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_watch, "_most_bytes", lambda: 5_000)
    client.publish(queue, *("x" * 1_000 for _ in range(50)))
    async with waiting(trigger(queue, never)):
        await until(lambda: client.ready(queue) < 50)
        (watch,) = BrokerThread._running.values()
        looks = 0
        for _ in range(20):
            watch.poll_now()
            await asyncio.sleep(0.05)
            looks = max(looks, 50 - client.ready(queue))
        assert 5 <= looks <= 15


def test_a_killed_triggerer_leaves_every_message_in_its_queue(client: RawClient, queue: str) -> None:
    ids = client.publish(queue, *("green" for _ in range(5)))
    triggerer = subprocess.Popen([sys.executable, "-m", "tests.acceptance.waiting_triggers", queue])
    try:
        wait_for(lambda: client.ready(queue) == 0, what="the messages are held", seconds=60)
    finally:
        os.kill(triggerer.pid, signal.SIGKILL)
        triggerer.wait()
    assert client.get_all(queue, 5) == [(message_id, 1) for message_id in ids]


def test_a_triggerer_that_shuts_down_requeues_its_messages_first(
    client: RawClient, queue: str, rabbitmq_version: str
) -> None:
    ids = client.publish(queue, *("green" for _ in range(100)))
    triggerer = subprocess.Popen([sys.executable, "-m", "tests.acceptance.waiting_triggers", queue, "3"])
    try:
        wait_for(lambda: client.ready(queue) == 0, what="the messages are held", seconds=60)
        triggerer.terminate()
        assert triggerer.wait(30) == 0
    finally:
        triggerer.kill()
    count = 0 if rabbitmq_version == "rabbitmq4" else 1
    assert client.get_all(queue, 100) == [(message_id, count) for message_id in ids]


def test_peeking_counts_no_delivery_or_is_refused(
    client: RawClient, queue: str, url: str, rabbitmq_version: str
) -> None:
    ids = client.publish(queue, "green", "green")
    with RabbitMQBroker(config_of(url)) as broker:
        if rabbitmq_version == "rabbitmq4":
            for _ in range(DELIVERY_LIMIT + 5):
                assert [message.id for message in broker.peek(queue, limit=5)] == ids
        else:
            with pytest.raises(BrokerError, match=r"counts a look at a message as a delivery.*RabbitMQ 4\.3 or later"):
                broker.peek(queue)
    assert client.get_all(queue, 2) == [(message_id, 0) for message_id in ids]


def test_a_sensor_in_a_worker_slot_counts_nothing_or_is_refused(
    client: RawClient, queue: str, rabbitmq_version: str
) -> None:
    ids = client.publish(queue, "green", "green")
    sensor = MessageSensor(
        task_id="wait", channel=queue, delay_conn_id="rabbit", filter=path_of(is_red), deferrable=False
    )
    if rabbitmq_version == "rabbitmq4":
        for _ in range(DELIVERY_LIMIT + 5):
            assert not sensor.poke({}).is_done
    else:
        with pytest.raises(ConfigurationError, match=r"use deferrable=True, no filter, or RabbitMQ 4\.3"):
            sensor.poke({})
    assert client.get_all(queue, 2) == [(message_id, 0) for message_id in ids]


async def test_returns_that_count_end_before_the_delivery_limit(
    client: RawClient, queue: str, rabbitmq_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ ends a consumer that holds a message for 30 minutes, so it has to be given back sometimes."""
    if rabbitmq_version == "rabbitmq4":
        pytest.skip("giving back counts nothing here")
    monkeypatch.setattr(shared_consumer, "RENEW_SECONDS", 0.1)
    [message_id] = client.publish(queue, "green")
    async with waiting(trigger(queue, never)) as (sensor,):
        with pytest.raises(BrokerError, match=r"use RabbitMQ 4\.3 or later, a separate queue"):
            await asyncio.wait_for(sensor, 30)
    [(left, counted)] = client.get_all(queue, 1)
    assert left == message_id
    assert counted <= shared_consumer.MOST_COUNTED + 1
