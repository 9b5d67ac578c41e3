"""RabbitMQ dies by SIGKILL while messages wait in it: none lost, none early, none left behind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.domain.message import Message
from tests.acceptance.rabbitmq_soak import Soak, count_messages, soak
from tests.ladder_path import path_of
from tests.rabbits import bind_queue, config_of, declare_queue, private_node
from tools.servers import component

CHANNEL = "orders"
TICK = 0.03
#: Delays in ticks, one hexadecimal digit for each wait: a first wait of 7.7 s, and none, one or two more after it.
ENDS_WHILE_DOWN = (0x100, 0x101, 0x110, 0x111, 0x1FF)
#: A first wait of 46 s, which outlasts the start of a node on a busy machine.
ENDS_WHEN_UP = (0x600, 0x601, 0x610, 0x611, 0x63F)
PER_DELAY = 20
A_SECOND = timedelta(seconds=1)

wait_for = partial(component.wait_for, seconds=60, interval=0.1)


def test_a_broker_killed_again_and_again_loses_nothing_that_it_confirmed(
    tmp_path: Path, rabbitmq_version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """M9, A44, B61, C11, C14, D11, D12"""
    work = Soak(
        messages=5_000,
        version=rabbitmq_version,
        kills=2,
        seconds=15,
        longest=15,
        cut_every=2,
        down=(0, 2),
        seed=3,
        tell=lambda _: None,
    )
    figures = soak(work, tmp_path)
    with capsys.disabled():
        print(f"\n{figures}")
    assert figures.lost == []
    assert figures.stuck == {}
    assert figures.strange == []
    assert figures.early == []
    assert figures.left_behind == {}
    assert figures.unroutable == 0
    assert len(figures.outages) == 2
    assert figures.cuts > 0


def test_the_first_message_of_a_new_ladder_outlives_a_broker_that_is_killed_at_once(tmp_path: Path) -> None:
    """C11, C14, D12: the broker keeps in memory alone, for about a second, that a quorum queue exists."""
    with private_node(tmp_path) as node:
        declare_queue(node.url, CHANNEL, **{"x-queue-type": "quorum"})
        config = config_of(node.url, tick=TICK)
        with RabbitMQBroker(config) as broker:
            in_a_moment = datetime.now(UTC) + timedelta(seconds=10)
            # The relay of an exchange is a queue too, the last one that is created here.
            channels = (CHANNEL, f"amq.direct:{CHANNEL}")
            messages = [Message(channel=channel, payload=b"", deliver_at=in_a_moment) for channel in channels]
            bind_queue(node.url, CHANNEL, exchange="amq.direct")
            broker.schedule(messages)
            node.kill()
        node.start_again()
        with RabbitMQBroker(config) as broker:
            received = receive_all(broker, len(messages))
    assert set(received) == {message.id for message in messages}


def test_messages_that_rest_in_idle_queues_while_the_broker_dies_arrive_nevertheless(
    tmp_path: Path, queue_type: str
) -> None:
    """A44, C11, C14, D12: around the kill nothing is published, moved or consumed."""
    with private_node(tmp_path) as node:
        declare_queue(node.url, CHANNEL, **{"x-queue-type": queue_type})
        config = config_of(node.url, tick=TICK)
        with RabbitMQBroker(config) as broker:
            prefix = f"{broker.create_topology([CHANNEL])}."
            messages = [
                Message(channel=CHANNEL, payload=b"", deliver_at=datetime.now(UTC) + timedelta(seconds=TICK * ticks))
                for ticks in (*ENDS_WHILE_DOWN, *ENDS_WHEN_UP)
                for _ in range(PER_DELAY)
            ]
            broker.schedule(messages)
            waits = {_end_of_first_wait(broker, message) for message in messages}
        node.kill()
        killed_at = datetime.now(UTC)
        wait_for(lambda: datetime.now(UTC) > min(waits) + A_SECOND, what="the shorter waits end while it is down")
        node.start_again()
        up_at = datetime.now(UTC)
        with RabbitMQBroker(config) as broker:
            received = receive_all(broker, len(messages))
        wait_for(lambda: not count_messages(node, prefix), what="nothing is left behind")
    assert min(waits) > killed_at, "the queues were not idle any more"
    assert min(waits) < up_at < max(waits), "both kinds of waits must be met"
    assert set(received) == {message.id for message in messages}
    assert [message.id for message in messages if min(received[message.id]) < message.deliver_at] == []


def _end_of_first_wait(broker: RabbitMQBroker, message: Message) -> datetime:
    """When the first of its waits ends, about."""
    now = datetime.now(UTC)
    longest = path_of(broker.topology.ladder, (message.deliver_at - now) // timedelta(milliseconds=1))[0]
    return now + timedelta(milliseconds=longest)


def receive_all(broker: RabbitMQBroker, count: int) -> dict[str, list[datetime]]:
    """Return when each message arrived, once all have."""
    received: dict[str, list[datetime]] = {}

    def got_all() -> bool:
        deliveries = broker.receive(CHANNEL, limit=1000)
        for delivery in deliveries:
            received.setdefault(delivery.message.id, []).append(datetime.now(UTC))
        broker.ack(deliveries)
        return len(received) == count

    wait_for(got_all, what=f"{count} messages arrive", seconds=120)
    return received
