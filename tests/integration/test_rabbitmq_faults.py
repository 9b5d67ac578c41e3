"""What goes wrong around a ladder: full queues, cut connections, crashed consumers, destinations that vanish."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from pika.exceptions import (
    ConnectionClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
    StreamLostError,
)

from airflow_delay_provider.brokers.rabbitmq import admin
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.brokers.rabbitmq.names import UNROUTABLE
from airflow_delay_provider.brokers.rabbitmq.publish import WINDOW
from airflow_delay_provider.brokers.rabbitmq.receive import ConsumerChannel
from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.testing.clock import SettableClock
from tests.integration.rabbitmq_scene import ON_TIME, Scene, ids_of, wait_for
from tests.rabbits import config_of, counted_looks, fresh_vhost, private_node
from tools.servers.cutting_proxy import CuttingProxy
from tools.servers.rabbitmq import RabbitMQ


@pytest.fixture
def scene(rabbitmq_version: str) -> Iterator[Scene]:
    with fresh_vhost() as url, Scene(url) as opened:
        yield opened


@pytest.fixture(scope="module")
def quorum(rabbitmq_version: str) -> Iterator[Scene]:
    with fresh_vhost() as url, Scene(url) as opened:
        yield opened


@pytest.fixture(scope="module")
def node(rabbitmq_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A private node that tries again soon what had no route."""
    with private_node(tmp_path_factory.mktemp("rabbitmq")) as started:
        yield started


# -- full queues ---------------------------------------------------------------------------------------------------


def test_a_full_queue_names_the_refused_messages_and_keeps_the_accepted_ones(node: RabbitMQ):
    """C11, C14"""
    with Scene(node.url, max_length=50, tick=0.25) as scene:
        channel, now = scene.queue(), from_ms(floor_ms(datetime.now(UTC)))
        # With a stopped clock all wait once and in one queue, however long this takes.
        due = now + timedelta(milliseconds=scene.topology.ladder.holds_ms[15])
        taken: list[Message] = []
        with RabbitMQBroker(scene.broker.config, clock=SettableClock(now)) as broker:
            # The limit is not exact: what is under way when it is reached is still taken.
            for _ in range(40):
                batch = [Message(channel=channel, payload=b"", deliver_at=due) for _ in range(50)]
                try:
                    broker.schedule(batch)
                except BrokerError as error:
                    full = error
                    break
                taken += batch
            else:
                pytest.fail("2 000 messages were taken by a queue for 50")
        assert re.search(r"refused \d+ of 50 messages because a queue is full; .* max_length", str(full))
        assert full.may_pass
        refused = [message for message in batch if message.id in full.unconfirmed]
        assert ids_of(refused) == sorted(full.unconfirmed)
        taken += [message for message in batch if message not in refused]
        assert ids_of(scene.collect(channel, len(taken), seconds=90)) == ids_of(taken)
        assert scene.broker.receive(channel) == [], "a message that was refused arrived all the same"
        scene.broker.schedule(refused)
        assert ids_of(scene.collect(channel, len(refused))) == ids_of(refused)


def test_a_message_whose_next_queue_is_full_waits_for_room(node: RabbitMQ):
    """C11, C14"""
    with Scene(node.url, max_length=20, tick=0.2) as scene:
        channel = scene.queue()
        # 17 ticks: one rung of 16 and one of 1, whose queue takes only a few at a time. All expire together.
        messages: list[Message] = []
        for _ in range(3):
            batch = scene.messages(channel, 20, after=3.3)
            left = publish(scene.broker, batch)
            messages += [message for message in batch if message not in left]
        arrivals = scene.collect(channel, len(messages), seconds=60)
        assert ids_of(arrivals) == ids_of(messages)
        wait_for(lambda: not scene.waiting(), what="nothing is left behind")


# -- lost connections ----------------------------------------------------------------------------------------------


class Tripwire:
    """A clock that does something when it is asked for the nth time: each message asks once, when it leaves."""

    def __init__(self) -> None:
        self._act: Callable[[], object] | None = None
        self._left = 0

    def arm(self, nth: int, act: Callable[[], object]) -> None:
        self._left, self._act = nth, act

    def now(self) -> datetime:
        self._left -= 1
        if self._left == 0 and self._act is not None:
            self._act()
        return datetime.now(UTC)


@pytest.fixture
def proxy(quorum: Scene) -> Iterator[CuttingProxy]:
    [(_, port)] = quorum.broker.config.hosts
    with CuttingProxy(port) as opened:
        yield opened


@pytest.fixture
def clock() -> Tripwire:
    return Tripwire()


@pytest.fixture
def cuttable(quorum: Scene, proxy: CuttingProxy, clock: Tripwire) -> Iterator[RabbitMQBroker]:
    """A broker behind the proxy."""
    [(_, port)] = quorum.broker.config.hosts
    config = config_of(quorum.url.replace(f":{port}/", f":{proxy.port}/"), **quorum.settings)
    with RabbitMQBroker(config, clock=clock) as broker:
        yield broker


def test_a_connection_lost_in_mid_batch_names_exactly_the_unconfirmed_and_the_next_call_connects_again(
    quorum: Scene, cuttable: RabbitMQBroker, proxy: CuttingProxy, clock: Tripwire
):
    """C11, C14"""
    channel = quorum.queue()
    cuttable.check_channels([channel])
    messages = quorum.messages(channel, 5 * WINDOW, after=0.5)
    clock.arm(3 * WINDOW, proxy.cut)
    with pytest.raises(BrokerError) as lost:
        cuttable.schedule(messages)
    unconfirmed = lost.value.unconfirmed
    confirmed = [message.id for message in messages if message.id not in set(unconfirmed)]
    assert len(unconfirmed) == len(set(unconfirmed))
    assert len(unconfirmed) + len(confirmed) == len(messages)
    # What had not left was not confirmed, and at most one window was under way.
    assert 2 * WINDOW <= len(unconfirmed) <= 3 * WINDOW + 10
    assert unconfirmed[-1] == messages[-1].id

    cuttable.schedule([message for message in messages if message.id in set(unconfirmed)])
    arrived: Counter[str] = Counter()

    def all_arrived() -> bool:
        deliveries = quorum.broker.receive(channel, limit=1000)
        arrived.update(delivery.message.id for delivery in deliveries)
        quorum.broker.ack(deliveries)
        return len(arrived) == len(messages)

    wait_for(all_arrived, what="every id arrives", seconds=60)
    assert set(arrived) == {message.id for message in messages}
    twice = [name for name, count in arrived.items() if count > 1]
    assert set(twice) <= set(unconfirmed), "only what was published again may come again"


def test_messages_whose_confirmations_are_lost_count_as_unconfirmed(
    quorum: Scene, cuttable: RabbitMQBroker, proxy: CuttingProxy
):
    """C11, C14"""
    channel = quorum.queue()
    cuttable.schedule(quorum.messages(channel, 1, after=0))
    quorum.collect(channel, 1)
    messages = quorum.messages(channel, 100, after=0.2)
    proxy.keep_answers_back()
    with ThreadPoolExecutor(1) as pool:
        scheduling = pool.submit(cuttable.schedule, messages)
        # All are stored; only their publisher does not know.
        assert ids_of(quorum.collect(channel, 100)) == ids_of(messages)
        proxy.cut()
        with pytest.raises(BrokerError) as lost:
            scheduling.result()
    assert lost.value.unconfirmed == tuple(message.id for message in messages)
    cuttable.schedule(messages)
    assert ids_of(quorum.collect(channel, 100)) == ids_of(messages), "published again, they come again by the same ids"


def test_a_broker_that_was_closed_or_cut_while_idle_can_be_used_again(
    quorum: Scene, cuttable: RabbitMQBroker, proxy: CuttingProxy
):
    """C11"""
    channel = quorum.queue()
    messages = quorum.messages(channel, 4, after=0.1)
    cuttable.schedule(messages[:1])
    cuttable.close()
    cuttable.close()
    cuttable.schedule(messages[1:2])
    assert proxy.cut()
    left = publish(cuttable, messages[2:3])
    assert publish(cuttable, left) == []
    # In the middle of everything else a connection is used for, too.
    proxy.cut()
    empty = quorum.queue()
    wait_for(lambda: works_again(lambda: cuttable.peek(empty)), what="peek works again")
    proxy.cut()
    wait_for(lambda: works_again(cuttable.journal_end), what="the journal can be read again")
    proxy.cut()
    wait_for(lambda: works_again(cuttable.check), what="check works again")
    cuttable.schedule(messages[3:])
    arrived = {arrival.message.id for arrival in quorum.collect(channel, 4)}
    assert arrived == {message.id for message in messages}


def test_an_unreachable_broker_names_all_messages_as_unconfirmed(quorum: Scene):
    """C11"""
    channel = quorum.queue()
    with CuttingProxy(1) as nowhere:
        [(_, port)] = quorum.broker.config.hosts
        config = config_of(quorum.url.replace(f":{port}/", f":{nowhere.port}/"), **quorum.settings)
        messages = quorum.messages(channel, 3, after=0.1)
        with RabbitMQBroker(config) as broker, pytest.raises(BrokerError) as refused:
            broker.schedule(messages)
    assert refused.value.may_pass
    assert refused.value.unconfirmed == tuple(message.id for message in messages)


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (ProbableAccessDeniedError(repr(StreamLostError("end of file"))), True),
        (ProbableAuthenticationError(repr(StreamLostError("end of file"))), True),
        (ProbableAccessDeniedError(repr(ConnectionClosedByBroker(530, "NOT_ALLOWED - vhost not found"))), False),
        (ProbableAuthenticationError(repr(ConnectionClosedByBroker(403, "ACCESS_REFUSED"))), False),
    ],
)
def test_a_connection_lost_while_it_is_opened_is_not_taken_for_a_refusal(error: Exception, may_pass: bool):
    translated = translate(error, config_of("amqp://guest:guest@localhost:5672/%2F"))
    assert isinstance(translated, BrokerError)
    assert translated.may_pass is may_pass


# -- crashed consumers ---------------------------------------------------------------------------------------------


def test_a_consumer_killed_between_publish_and_ack_repeats_the_message_and_loses_nothing(quorum: Scene):
    """A14, A23, A44, C2, C11, C14"""
    channel = quorum.queue()
    message = quorum.message(channel, after=0.1)
    quorum.broker.schedule([message])
    command = [sys.executable, "-m", "tests.integration.crashing_consumer", quorum.url, channel]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    arrivals = quorum.collect(channel, 2)
    assert [arrival.message.id for arrival in arrivals] == [message.id, message.id]
    # Once redelivered because it was not acknowledged, once because it was requeued.
    assert sorted(arrival.message.handled_count for arrival in arrivals) == [0, 1]
    assert quorum.broker.receive(channel) == []


def test_peeking_at_a_queue_that_others_empty_meanwhile_costs_no_connection(
    quorum: Scene, monkeypatch: pytest.MonkeyPatch
):
    """C11: the queue has fewer messages than it has just reported."""
    channel = quorum.queue()
    message = quorum.message(channel, after=0)
    quorum.broker.send([message])
    connection = quorum.broker._client.connection()
    wait_for(lambda: quorum.count(channel), what="the message")
    with counted_looks(), monkeypatch.context() as patched:
        patched.setattr(admin, "message_count", lambda *_: 3)
        assert quorum.broker.peek(channel, limit=3) == [message]
    assert quorum.broker._client.connection() is connection
    assert ids_of(quorum.collect(channel, 1)) == [message.id]


def test_a_consumer_whose_queue_is_deleted_ends_at_once(quorum: Scene):
    """C11, C14: the broker has ended it, and answers no more when it is ended."""
    with quorum.open(confirm_timeout=5) as broker:
        consumer = ConsumerChannel(broker._client.connection(), quorum.queue())
        tag = consumer.begin(prefetch=1)
        with quorum.amqp() as amqp:
            amqp.queue_delete(consumer.queue)
        wait_for(lambda: not consumer.is_open, what="the consumer is closed")
        consumer.end(tag)


# -- destinations that vanish --------------------------------------------------------------------------------------


def test_messages_whose_queue_was_deleted_are_parked_and_block_no_others(scene: Scene):
    """C12, C14"""
    gone, kept = scene.queue(), scene.queue()
    orphans = [scene.message(gone, after=0.1 * n, headers={"n": str(n)}, key="k") for n in range(50, 70)]
    others = [scene.message(kept, after=0.1 * n) for n in range(50, 70)]
    scene.broker.schedule([message for pair in zip(orphans, others, strict=True) for message in pair])
    with scene.amqp() as amqp:
        amqp.queue_delete(gone)
    arrivals = scene.collect(kept, 20)
    assert ids_of(arrivals) == ids_of(others)
    assert max(arrival.lateness for arrival in arrivals) < ON_TIME
    parked = scene.collect(UNROUTABLE, 20)
    assert sorted((each.message for each in parked), key=lambda each: each.deliver_at) == orphans
    wait_for(lambda: not scene.waiting(), what="nothing is left behind")


def test_messages_that_an_exchange_does_not_route_wait_for_a_binding_and_block_no_others(node: RabbitMQ):
    """C3, C12"""
    exchange, scene = f"exchange-{uuid4().hex}", Scene(node.url)
    kept, late = scene.queue(), scene.queue()
    with scene, scene.amqp() as amqp:
        amqp.exchange_declare(exchange, "topic", durable=True)
        orphans = [scene.message(f"{exchange}:no.route", after=0.1 * n, headers={"n": str(n)}) for n in range(1, 20)]
        others = [scene.message(kept, after=0.1 * n) for n in range(1, 20)]
        scene.broker.schedule([message for pair in zip(orphans, others, strict=True) for message in pair])
        arrivals = scene.collect(kept, 19)
        assert ids_of(arrivals) == ids_of(others)
        assert max(arrival.lateness for arrival in arrivals) < ON_TIME
        relay = scene.topology.relay(f"{exchange}:no.route")
        wait_for(lambda: held_by(node, relay) == 19, what="all wait in the relay")
        assert not scene.waiting()
        amqp.queue_bind(late, exchange, "no.#")
        arrivals = scene.collect(late, 19)
        assert sorted((each.message for each in arrivals), key=lambda each: each.deliver_at) == orphans
        wait_for(lambda: held_by(node, relay) == 0, what="the relay is empty")


def held_by(node: RabbitMQ, queue: str) -> int:
    """How many messages a queue has, with those that it tries to pass on; the broker updates it every 5 s."""
    lines = (
        line.split("\t") for line in node.control("list_queues", "--no-table-headers", "name", "messages").splitlines()
    )
    return int(dict(lines).get(queue) or 0)


def publish(broker: RabbitMQBroker, messages: list[Message]) -> list[Message]:
    """Publish once and return the unconfirmed messages."""
    try:
        broker.schedule(messages)
    except BrokerError as error:
        return [message for message in messages if message.id in set(error.unconfirmed)]
    return []


def works_again(call: Callable[[], Any]) -> bool:
    try:
        call()
    except BrokerError:
        return False
    return True
