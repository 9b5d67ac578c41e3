"""Dispatchers and brokers die while messages wait in Kafka: none lost, none twice, none early."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import TopicPartition

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.reader import PartitionId, log_ends
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.message import Message
from tests.acceptance.kafka_dispatcher import config_of
from tests.acceptance.kafka_soak import Dispatcher, Soak, id_of, now_ms, read_to_end, soak
from tests.kafkas import delete_ladder, fresh_topic, private_cluster, require_kafka
from tools.servers import component

wait_for = partial(component.wait_for, seconds=120, interval=0.1)


@pytest.mark.timeout(600)
def test_dispatchers_and_the_broker_killed_again_and_again_lose_nothing_and_repeat_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """M9, D7, D11, D12, E1, E11, E12, B32"""
    work = Soak(
        messages=3_000,
        seconds=25,
        longest=20,
        kills=4,
        turns=3,
        partitions=2,
        channel_partitions=2,
        seed=5,
        tell=lambda _: None,
    )
    figures = soak(work, tmp_path)
    with capsys.disabled():
        print(f"\n{figures}")
    assert figures.is_good, "\n".join([str(figures), *figures.last_words])
    assert len(figures.broker_down) == 1


class Scene:
    """A ladder that dispatchers of the test's own serve, as processes."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.given: dict[str, Any] = {
            "bootstrap": bootstrap,
            "settings": {"ladder": f"killed-{uuid4().hex[:8]}", "partitions": 2},
        }
        self.broker = KafkaBroker(config_of(self.given))
        self.broker.create_topology()
        self._clients = KafkaClients(self.broker.config)
        self.channel = fresh_topic(bootstrap, partitions=2, message_timestamp_type="LogAppendTime")
        self.scheduled: dict[str, Message] = {}
        self._folder = folder
        self._dispatchers: list[Dispatcher] = []

    def dispatcher(self, instance: str | None = None, *, after: Path | None = None) -> Dispatcher:
        started = Dispatcher(self.given, self._folder, instance, after)
        self._dispatchers.append(started)
        return started

    def schedule(self, count: int, *, first: float, last: float) -> None:
        now = datetime.now(UTC)
        batch = [
            Message(
                channel=self.channel,
                payload=b"",
                deliver_at=now + timedelta(seconds=first + (last - first) * number / count),
            )
            for number in range(count)
        ]
        self.broker.schedule(batch)
        self.scheduled |= {message.id: message for message in batch}

    def due_ms(self) -> int:
        """When the last one is due."""
        return max(ceil_ms(message.deliver_at) for message in self.scheduled.values())

    def arrived(self) -> Counter[str]:
        """How often each id lies in the channel; none may be early."""
        found: Counter[str] = Counter()
        for record in read_to_end(self.bootstrap, [self.channel]):
            message_id = id_of(record)
            found[message_id] += 1
            assert record.timestamp()[1] >= ceil_ms(self.scheduled[message_id].deliver_at)
        return found

    def log_ends(self) -> dict[PartitionId, int]:
        """Where the inbox and the rungs end, asked with the same client each time until all have a leader."""
        topology = self.broker.topology
        topics = [topology.inbox, *map(topology.rung, topology.ladder.holds_ms)]
        partitions = [TopicPartition(topic, number) for topic in topics for number in (0, 1)]

        def look() -> dict[PartitionId, int] | None:
            try:
                return log_ends(self._clients, partitions)
            except BrokerError:
                return None

        return wait_for(look, what="all partitions have a leader")

    def check_all_arrived_once(self) -> None:
        arrived = self.arrived()
        assert set(arrived) == set(self.scheduled)
        twice = {message_id for message_id, count in arrived.items() if count != 1}
        assert not twice, self._describe(twice)

    def _describe(self, message_ids: set[str]) -> str:
        """Where these messages lie, and the last words of the dispatchers."""
        records = [
            f"{each.partition()}:{each.offset()} at {each.timestamp()[1]}: {id_of(each)}"
            for each in read_to_end(self.bootstrap, [self.channel])
            if id_of(each) in message_ids
        ]
        return "\n".join([*records, *(each.last_words() for each in self._dispatchers)])

    def close(self) -> None:
        for each in self._dispatchers:
            if each.is_running():
                each.kill()
        self._clients.close()
        self.broker.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    opened = Scene(require_kafka(), tmp_path)
    yield opened
    opened.close()
    with KafkaBroker(config_of(opened.given)) as broker:
        delete_ladder(broker)


@pytest.mark.timeout(600)
def test_a_dispatcher_that_slept_past_its_session_delivers_nothing_twice(scene: Scene) -> None:
    """B32, D11, E12: what it had in memory is long due when it wakes, and another has delivered it."""
    zombie = scene.dispatcher()
    wait_for(lambda: zombie.partitions() == (0, 1), what="the first serves all partitions")
    scene.schedule(1_000, first=1, last=15)
    wait_for(scene.arrived, what="the first delivers")
    zombie.process.send_signal(signal.SIGSTOP)
    other = scene.dispatcher()
    try:
        wait_for(lambda: other.partitions() == (0, 1), what="the other has taken over")
        wait_for(lambda: now_ms() > scene.due_ms() and len(scene.arrived()) == 1_000, what="the other delivers all")
        # Some that the zombie does not know of, while it looks around.
        scene.schedule(500, first=0.5, last=6)
    finally:
        zombie.process.send_signal(signal.SIGCONT)
    wait_for(lambda: len(zombie.partitions()) == 1 and len(other.partitions()) == 1, what="they share the partitions")
    wait_for(lambda: now_ms() > scene.due_ms() and len(scene.arrived()) == 1_500, what="all are delivered")
    assert zombie.stop(), zombie.last_words()
    assert other.stop(), other.last_words()
    scene.check_all_arrived_once()


@pytest.mark.timeout(600)
def test_a_named_dispatcher_goes_on_at_once_after_it_was_killed(scene: Scene, tmp_path: Path) -> None:
    """D12: the group need not wait until its session times out."""
    scene.dispatcher("one").process.poll()
    first = scene.dispatcher("two")
    wait_for(lambda: len(first.partitions()) == 1, what="both serve a partition")
    go = tmp_path / "go"
    again = scene.dispatcher("two", after=go)
    wait_for(again.is_ready, what="the next one could begin")
    scene.schedule(600, first=0.1, last=9)
    wait_for(lambda: len(scene.arrived()) > 50, what="they deliver")
    first.kill()
    killed_at = now_ms()
    go.touch()
    wait_for(lambda: again.partitions() == first.partitions(), what="it has its partition again", interval=0.02)
    assert now_ms() - killed_at < 8_000, "as long as the others would have needed to miss it"
    wait_for(lambda: now_ms() > scene.due_ms() and len(scene.arrived()) == 600, what="all are delivered")
    scene.check_all_arrived_once()


@pytest.mark.timeout(600)
def test_a_cluster_that_loses_a_node_loses_no_message_and_delays_few(tmp_path: Path) -> None:
    """D11, D12, E1: leaders move to other nodes, for messages, the group, transactions and the metadata."""
    with private_cluster(tmp_path) as cluster:
        scene = Scene(cluster.bootstrap, tmp_path)
        try:
            dispatchers = [scene.dispatcher(), scene.dispatcher()]
            wait_for(lambda: all(len(each.partitions()) == 1 for each in dispatchers), what="both serve a partition")
            scene.schedule(1_000, first=1, last=25)
            wait_for(scene.arrived, what="they deliver")
            ends = scene.log_ends()
            cluster.kill(1)
            # Otherwise committed records would count as lost, and their messages would be delivered again.
            assert all(end >= ends[each] for each, end in scene.log_ends().items())
            so_far = len(scene.arrived())
            scene.schedule(200, first=1, last=10)
            wait_for(lambda: len(scene.arrived()) > so_far, what="they deliver without the node")
            wait_for(lambda: len(scene.arrived()) == 1_200, what="all are delivered")
            for each in dispatchers:
                assert each.stop(), each.last_words()
            scene.check_all_arrived_once()
        finally:
            scene.close()
