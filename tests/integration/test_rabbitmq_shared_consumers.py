"""What a shared consumer holds of a RabbitMQ queue, and how everything gets back to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest

from airflow_delay_provider.brokers.consumer import BATCH, Bound, SharedConsumer
from airflow_delay_provider.brokers.rabbitmq import shared_consumer
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.receive import ConsumerChannel
from airflow_delay_provider.brokers.rabbitmq.shared_consumer import RabbitMQSharedConsumer
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.message import Message
from tests.integration.test_rabbitmq_sensors import RawClient
from tests.rabbits import config_of, require_rabbitmq
from tools.servers.component import wait_for


class Scene:
    """A quorum queue, another program that uses it, and what each of our clients sees of it."""

    def __init__(self, version: str) -> None:
        self.url = require_rabbitmq()
        self.version = version
        self.client = RawClient(self.url)
        self.queue = self.client.fresh_queue(version)
        #: What one return costs.
        self.returned = 0 if version == "rabbitmq4" else 1

    @contextmanager
    def consumer(self) -> Iterator[SharedConsumer]:
        with (
            RabbitMQBroker(config_of(self.url)) as broker,
            closing(broker.open_shared_consumer(on_change=lambda: None)) as consumer,
        ):
            yield consumer

    def view(self, consumer: SharedConsumer, bound: Bound | None = None) -> Sequence[Message]:
        view = consumer.look({self.queue: bound or Bound()})[self.queue]
        if isinstance(view, Exception):
            raise view
        return view

    def sees(self, consumer: SharedConsumer, n: int, bound: Bound | None = None) -> None:
        wait_for(lambda: len(self.view(consumer, bound)) >= n, what=f"{n} messages are held", seconds=20)


@pytest.fixture
def scene(rabbitmq_version: str) -> Iterator[Scene]:
    scene = Scene(rabbitmq_version)
    yield scene
    scene.client.channel.queue_delete(scene.queue)
    scene.client.close()


@pytest.mark.parametrize("kept", [0, 1])
def test_a_hundred_messages_released_before_the_end_keep_their_order_and_count_no_more_than_one_return(
    scene: Scene, kept: int
) -> None:
    """Of many single returns a closing channel drops all but the first 32."""
    ids = scene.client.publish(scene.queue, *("green" for _ in range(100)))
    with RabbitMQBroker(config_of(scene.url)) as broker:
        received = [*broker.receive(scene.queue, limit=100)]
        wait_for(
            lambda: len(received.__iadd__(broker.receive(scene.queue, limit=100))) == 100, what="all came", seconds=20
        )
        broker.release(received[: len(received) - kept])
    expected = [(message_id, scene.returned) for message_id in ids[: 100 - kept]]
    assert scene.client.get_all(scene.queue, 100)[: 100 - kept] == expected


def test_waits_one_after_the_other_end_with_an_error_before_the_delivery_limit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them counts one delivery on versions that count returns, however short it was."""
    monkeypatch.setattr(shared_consumer, "SHORTEST_HOLD_SECONDS", 0.1)
    [message_id] = scene.client.publish(scene.queue, "green")

    def wait_often() -> None:
        for _ in range(shared_consumer.MOST_COUNTED + 2):
            with scene.consumer() as consumer:
                scene.sees(consumer, 1)
                time.sleep(0.15)
                scene.view(consumer)

    if scene.version == "rabbitmq4":
        wait_often()
    else:
        with pytest.raises(BrokerError, match=r"message .* was delivered 10 times and passes no sensor's filter"):
            wait_often()
    [(left, counted)] = scene.client.get_all(scene.queue, 1)
    assert left == message_id
    assert counted <= (shared_consumer.MOST_COUNTED + 1) * scene.returned


def test_a_promised_message_is_kept_although_another_triggerer_consumes(scene: Scene) -> None:
    """The consumers of another triggerer are no task that has come: it would hold the message, and want it not."""
    scene.client.publish(scene.queue, "green")
    with scene.consumer() as other, scene.consumer() as consumer, RabbitMQBroker(config_of(scene.url)) as worker:
        scene.sees(other, 1, Bound(messages=1))
        [message_id] = scene.client.publish(scene.queue, "red")
        scene.sees(consumer, 1)
        # From now on the other one would get what is given back.
        scene.view(other)
        consumer.promise(scene.queue, message_id)
        for _ in range(8):
            assert message_id in [message.id for message in scene.view(consumer)]
            time.sleep(0.1)
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(worker.receive, scene.queue, limit=1, wait=timedelta(seconds=20))
            wait_for(lambda: scene.view(consumer) is not None and taken.done(), what="the task has it", seconds=30)
        assert [delivery.message.id for delivery in taken.result()] == [message_id]


def test_more_is_asked_for_when_large_messages_have_gone(scene: Scene) -> None:
    bound = Bound(bytes=BATCH * 1000)
    large = scene.client.publish(scene.queue, *("x" * 1000 for _ in range(BATCH)))
    with scene.consumer() as consumer:
        scene.sees(consumer, BATCH, bound)
        scene.view(consumer, bound)
        for message_id in large:
            consumer.promise(scene.queue, message_id)
        scene.view(consumer, bound)
        scene.client.consume(scene.queue)

        def has_taken_all() -> bool:
            scene.view(consumer, bound)
            scene.client.serve()
            return len(scene.client.pushed) == BATCH

        wait_for(has_taken_all, what="the large ones are taken", seconds=20)
        for tag in scene.client.channel.consumer_tags:
            scene.client.channel.basic_cancel(tag)
        scene.client.publish(scene.queue, *("green" for _ in range(3 * BATCH)))
        scene.sees(consumer, 3 * BATCH, bound)


def test_a_queue_that_was_created_again_leaves_no_amqp_channel_open(scene: Scene) -> None:
    scene.client.publish(scene.queue, "green")
    with scene.consumer() as consumer:
        assert isinstance(consumer, RabbitMQSharedConsumer)
        scene.sees(consumer, 1)
        before = consumer._queues[scene.queue]
        scene.client.channel.queue_delete(scene.queue)
        wait_for(lambda: not before.is_open, what="the consumer is closed", seconds=20)
        scene.client.channel.queue_declare(scene.queue, durable=True, arguments={"x-queue-type": "quorum"})
        scene.client.publish(scene.queue, "green")
        scene.sees(consumer, 1)
        assert before._consumer.channel.closed is not None


def test_messages_that_arrive_while_a_consumer_ends_are_not_rejected(scene: Scene) -> None:
    """The client library would reject it, which counts a delivery on every version."""
    ids = scene.client.publish(scene.queue, *("green" for _ in range(100)))
    rounds = 5
    with RabbitMQBroker(config_of(scene.url)) as broker:
        for _ in range(rounds):
            consumer = ConsumerChannel(broker._client.connection(), scene.queue)
            consumer.end(consumer.begin(prefetch=100))
            consumer.give_back([item.tag for item in consumer.take(100)])
            consumer.close()
            wait_for(lambda: scene.client.ready(scene.queue) == 100, what="all are back", seconds=20)
    left = scene.client.get_all(scene.queue, 100)
    assert [message_id for message_id, _ in left] == ids
    assert max(counted for _, counted in left) <= rounds * scene.returned
