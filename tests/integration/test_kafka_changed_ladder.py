"""A ladder whose topics are changed while dispatchers serve it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewPartitions, NewTopic

from airflow_delay_provider.brokers.kafka.dispatch.loop import KafkaLadderDispatcher
from airflow_delay_provider.domain.message import Message
from tests.integration.test_kafka_faults import Scene, headers_of, ids_of
from tests.kafkas import create_topic, produce, require_kafka
from tools.servers import component

pytestmark = pytest.mark.timeout(300)

wait_for = partial(component.wait_for, seconds=60, interval=0.1)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene(require_kafka()) as opened:
        yield opened


@contextmanager
def dispatching(scene: Scene, **settings: int) -> Iterator[KafkaLadderDispatcher]:
    """Run a dispatcher with settings of its own."""
    stop, failures = threading.Event(), list[Exception]()
    with scene.open(**settings) as own:
        dispatcher = own.open_ladder_dispatcher()

        def dispatch() -> None:
            while not stop.is_set():
                try:
                    dispatcher.run_once()
                except Exception as error:  # noqa: BLE001 - it continues like the real one
                    failures.append(error)
                    stop.wait(0.2)
            dispatcher.close()

        thread = threading.Thread(target=dispatch)
        thread.start()
        try:
            yield dispatcher  # type: ignore[misc]
        finally:
            stop.set()
            thread.join(120)


def create_again(scene: Scene, name: str) -> None:
    """Delete a topic of the ladder and create it as it was."""
    scene.admin.delete_topics([name])[name].result(60)
    wait_for(lambda: name not in scene.admin.list_topics(timeout=10).topics, what=f"{name} is gone")
    [topic] = [each for each in scene.topology.topics() if each.name == name]

    def is_created() -> bool:
        try:
            create_topic(scene.admin, NewTopic(name, scene.topology.partitions, config=dict(topic.settings)))
        except KafkaException:
            return False
        return True

    wait_for(is_created, what=f"{name} is created again")


def test_an_inbox_that_was_created_again_is_read_from_its_beginning(scene: Scene) -> None:
    """Its offsets start again at zero, and the committed ones lie beyond its end."""
    channel, after = scene.channel(), scene.channel()
    with dispatching(scene):
        before = scene.messages(channel, 60, after=0.5)
        scene.broker.schedule(before)
        scene.arrived(channel, 60)
        create_again(scene, scene.topology.inbox)
        with scene.open() as client:
            client.schedule(messages := scene.messages(after, 30, after=1))
        assert ids_of(scene.arrived(after, 30, seconds=40)) == ids_of(messages)


def test_added_partitions_are_read_and_reported(scene: Scene) -> None:
    inbox, channel = scene.topology.inbox, scene.channel()
    headers = {"delay-channel": channel.encode(), "delay-deliver-after-ms": b"3000", "delay-id": b"in-the-third"}
    with dispatching(scene) as dispatcher:
        scene.wait_for_dispatcher()
        assert dispatcher.trouble is None
        scene.admin.create_partitions([NewPartitions(inbox, 3)])[inbox].result(60)
        wait_for(lambda: len(scene.admin.list_topics(inbox, 10).topics[inbox].partitions) == 3, what="it is known")
        produce(scene.bootstrap, inbox, [b"x"], headers=headers, partition=2)
        [record] = scene.arrived(channel, 1, seconds=60)
        assert headers_of(record)["delay-id"] == "in-the-third"
        trouble = wait_for(lambda: dispatcher.trouble, what="it is reported")
        assert "has 3 partitions and the connection says 2; set it to 3" in trouble
    with scene.open() as client:
        problems = [issue.text for issue in client.verify_topology() if issue.is_problem]
    assert any(inbox in text and "3 partitions" in text for text in problems)
    with scene.open(partitions=3) as client, dispatching(scene, partitions=3) as dispatcher:
        assert [issue.text for issue in client.verify_topology() if issue.is_problem] == []
        client.schedule(messages := scene.messages(again := scene.channel(), 30, after=1))
        assert ids_of(scene.arrived(again, 30)) == ids_of(messages)
        assert dispatcher.trouble is None


def test_rungs_that_only_another_dispatcher_has_created_are_served_by_all(scene: Scene) -> None:
    """One has a radix of 4 and the other one of 16; messages rest in rungs of both, and one of the two ends."""
    channel, messages, rung = scene.channel(), list[Message](), f"{scene.topology.prefix}.rung.14000ms"
    with dispatching(scene):
        scene.wait_for_dispatcher()
        with dispatching(scene, radix=16):

            def is_waiting() -> bool:
                scene.broker.schedule(some := scene.messages(channel, 20, after=16))
                messages.extend(some)
                # While it is created, it has no leader.
                with suppress(KafkaException, KeyError):
                    return sum(scene.ends(rung).values()) > 10
                return False

            wait_for(is_waiting, what="messages rest where only the other one has put them", interval=0.5)
        assert ids_of(scene.arrived(channel, len(messages), seconds=60)) == ids_of(messages)
