"""Sensors that wait on Kafka: one reader for all of them, a member of no group, that takes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_delay_provider.brokers.kafka import shared_consumer
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import UnknownChannelError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.sensors.message import MessageSensor
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from airflow_delay_provider.triggers.channel_watch import ChannelWatch
from airflow_delay_provider.triggers.message import ChannelTrigger
from tests.integration.running_triggers import is_blue, is_red, never, path_of, waiting
from tests.kafkas import connection_of, fresh_topic, produce, require_kafka
from tests.waiting import until


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> str:
    bootstrap = require_kafka()
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA", json.dumps(connection_of(bootstrap)))
    return bootstrap


@pytest.fixture
def topic(bootstrap: str) -> str:
    return fresh_topic(bootstrap, 2)


def trigger(topic: str, passes: Callable[[Message], bool] | None, **options: Any) -> ChannelTrigger:
    filter = None if passes is None else path_of(passes)
    return ChannelTrigger(channel=topic, delay_conn_id="kafka", filter=filter, **options)


async def seen(topic: str) -> None:
    """Return once the shared consumer reads a topic."""

    def reads() -> bool:
        watches = [each for each in BrokerThread._running.values() if isinstance(each, ChannelWatch)]
        return any(topic in watch._seen for watch in watches)

    await until(reads, seconds=60)


async def taken_by_worker(topic: str, passes: Callable[[Message], bool], message_id: str) -> Any:
    sensor = MessageSensor(task_id="wait", channel=topic, delay_conn_id="kafka", filter=path_of(passes), timeout=60)
    event = {"message_id": message_id, "give_up_at": "2100-01-01T00:00:00+00:00"}
    return await asyncio.wait_for(asyncio.to_thread(sensor.execute_complete, {}, event), 60)


async def test_any_number_of_sensors_share_one_client_that_stays(
    bootstrap: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look used to make one of its own."""
    made: list[Consumer] = []

    def make_consumer(clients: KafkaClients, *settings: Any) -> Consumer:
        made.append(consumer := make(clients, *settings))
        return consumer

    make = KafkaClients.make_consumer
    monkeypatch.setattr(KafkaClients, "make_consumer", make_consumer)
    async with waiting(*(trigger(topic, never) for _ in range(50)), trigger(topic, is_red)) as sensors:
        await seen(topic)
        produce(bootstrap, topic, [b"green"] * 5)
        await asyncio.sleep(3)
        produce(bootstrap, topic, [b"red"])
        await asyncio.wait_for(sensors[-1], 30)
        assert len(made) == 1


async def test_a_sensor_that_waits_joins_no_group_and_commits_nothing(bootstrap: str, topic: str) -> None:
    produce(bootstrap, topic, [b"green"] * 5)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    async with waiting(trigger(topic, never)):
        await seen(topic)
        groups = [group.group_id for group in admin.list_consumer_groups().result().valid]
        assert not [group for group in groups if group.endswith(f".{topic}")]
    with KafkaBroker(KafkaConfig.from_settings({}, host=bootstrap)) as broker:
        assert len(broker.receive(topic, limit=10)) == 5


async def test_each_of_two_sensors_takes_its_own_message_and_the_others_stay(bootstrap: str, topic: str) -> None:
    async with waiting(trigger(topic, is_red), trigger(topic, is_blue)) as (red, blue):
        await seen(topic)
        produce(bootstrap, topic, [b"green", b"red", b"blue"])
        events = [await asyncio.wait_for(each, 30) for each in (red, blue)]
    for passes, event in zip((is_red, is_blue), events, strict=True):
        assert (await taken_by_worker(topic, passes, event["message_id"]))["id"] == event["message_id"]
    with KafkaBroker(KafkaConfig.from_settings({}, host=bootstrap)) as broker:
        assert [delivery.message.payload for delivery in broker.receive(topic, limit=10)] == [b"green"]


async def test_messages_that_others_acknowledged_wake_no_sensor(bootstrap: str, topic: str) -> None:
    produce(bootstrap, topic, [b"red", b"red"])
    with KafkaBroker(KafkaConfig.from_settings({}, host=bootstrap)) as broker:
        broker.ack(broker.receive(topic, limit=2))
    async with waiting(trigger(topic, is_red)) as (sensor,):
        await seen(topic)
        produce(bootstrap, topic, [b"green"])
        await asyncio.sleep(2)
        assert not sensor.done()


async def test_messages_that_are_there_again_since_the_group_was_set_back_are_seen(
    bootstrap: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_consumer, "PARTITIONS_SECONDS", 1.0)
    produce(bootstrap, topic, [b"red"])
    with KafkaBroker(KafkaConfig.from_settings({}, host=bootstrap)) as broker:
        broker.ack(broker.receive(topic, limit=1))
    admin = AdminClient({"bootstrap.servers": bootstrap})
    groups = [group.group_id for group in admin.list_consumer_groups().result().valid]
    [group] = [each for each in groups if each.endswith(f".{topic}")]
    async with waiting(trigger(topic, is_red)) as (sensor,):
        await seen(topic)
        start = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, number, 0) for number in range(2)])
        for altered in admin.alter_consumer_group_offsets([start]).values():
            altered.result(30)
        await asyncio.wait_for(sensor, 30)


async def test_a_deleted_topic_holds_up_its_own_sensors_only(
    bootstrap: str, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(BrokerThread, "outage", Backoff(**dict.fromkeys(("initial", "cap", "floor"), Backoff().floor)))
    doomed = fresh_topic(bootstrap)
    produce(bootstrap, doomed, [b"green"])
    async with waiting(trigger(doomed, is_red), trigger(topic, is_red)) as (waits_on, healthy):
        await seen(doomed)
        await seen(topic)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for deleted in admin.delete_topics([doomed]).values():
            deleted.result(30)
        await until(lambda: f"cannot consume channel {doomed}" in caplog.text, seconds=60)
        produce(bootstrap, topic, [b"red"])
        await asyncio.wait_for(healthy, 30)
        assert not waits_on.done()


async def test_a_topic_that_never_existed_fails_its_own_sensors_only(bootstrap: str, topic: str) -> None:
    async with waiting(trigger("no-such-topic", is_red), trigger(topic, is_red)) as (mistaken, healthy):
        with pytest.raises(UnknownChannelError, match="has no topic 'no-such-topic'"):
            await asyncio.wait_for(mistaken, 30)
        produce(bootstrap, topic, [b"red"])
        await asyncio.wait_for(healthy, 30)
