"""Destinations that do not take their messages: full, deleted, or an exchange that routes nowhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from unittest.mock import patch
from uuid import uuid4

import pytest
from airflow.sdk.exceptions import AirflowFailException
from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq import admin, journal, management
from airflow_delay_provider.brokers.rabbitmq.names import UNROUTABLE
from airflow_delay_provider.brokers.rabbitmq.publish import Publisher
from airflow_delay_provider.domain.exceptions import DelayError, MessagesWaitError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.sensors.message import MessageDispatchedSensor
from tests.contract.journal import Tail
from tests.integration.rabbitmq_scene import Scene, ids_of, wait_for
from tests.rabbits import connection_of, fresh_vhost, private_node, require_management
from tools.servers.rabbitmq import RabbitMQ

#: How late a message may be on a busy machine; one that waits for a full queue would be later by minutes.
SOON = timedelta(seconds=10)
#: Seconds until messages are due whose queue is deleted before, however busy the machine is.
LATER = 4.0


#: What was refused is tried again after 3 s and not after 180; queues count their messages every second, not every 5.
SOON_TRIED_AND_COUNTED = """
[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 3000}, {quorum_tick_interval, 1000}]}].
"""
COUNTED_WITHIN = timedelta(seconds=4)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A broker that retries refused messages soon, and clients that know it."""
    run_dir = tmp_path_factory.mktemp("refusals")
    with ExitStack() as stack:
        started = stack.enter_context(private_node(run_dir, advanced=SOON_TRIED_AND_COUNTED))
        stack.enter_context(patch.object(admin, "SETTLE_SECONDS", 0))
        for module in (journal, management, admin):
            stack.enter_context(patch.object(module, "TOTALS_LAG", COUNTED_WITHIN))
        yield started


@pytest.fixture
def scene() -> Iterator[Scene]:
    with fresh_vhost() as url, Scene(url, management_url=require_management()) as opened:
        yield opened


def full_queue(scene: Scene, *, most: int) -> str:
    """Return a classic queue that holds as many messages as it takes."""
    name = f"full-{uuid4().hex}"
    with scene.amqp() as amqp:
        amqp.queue_declare(name, durable=True, arguments={"x-max-length": most, "x-overflow": "reject-publish"})
        amqp.confirm_delivery()
        for _ in range(most):
            amqp.basic_publish("", name, b"in the way")
    return name


def nowhere(scene: Scene) -> str:
    """Return a new exchange that leads nowhere yet."""
    name = f"nowhere-{uuid4().hex}"
    with scene.amqp() as amqp:
        amqp.exchange_declare(name, "topic", durable=True)
    return name


def changes_of(tail: Tail, messages: list[Message]) -> dict[str, list[Change]]:
    tail.read()
    return {
        message.id: [entry.change for entry in tail.of([message]) if entry.change is not Change.SCHEDULED]
        for message in messages
    }


def sensor_of(scene: Scene, ids: list[str], monkeypatch: pytest.MonkeyPatch) -> MessageDispatchedSensor:
    """Return the sensor of a task that waits for these messages."""
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", json.dumps(connection_of(scene.url, **scene.settings)))
    return MessageDispatchedSensor(task_id="wait", message_ids=ids, delay_conn_id="rabbit")


def test_a_full_queue_blocks_no_other_and_gets_everything_once_it_has_room(node: RabbitMQ):
    with Scene(node.url) as scene:
        full, healthy, now = full_queue(scene, most=300), scene.queue(), datetime.now(UTC)
        scene.broker.check_channels([full, healthy])

        def due_in_a_second(channel: str, count: int) -> list[Message]:
            return [Message(channel=channel, payload=b"", deliver_at=now + timedelta(seconds=1)) for _ in range(count)]

        # All wait in the same rung, the refused ones in front.
        refused, others = due_in_a_second(full, 260), due_in_a_second(healthy, 200)
        scene.schedule_in_time([*refused, *others], now=now)

        arrivals = scene.collect(healthy, 200)

        assert ids_of(arrivals) == ids_of(others)
        assert max(arrival.lateness for arrival in arrivals) < SOON
        with scene.amqp() as amqp:
            amqp.queue_purge(full)
        assert ids_of(scene.collect(full, 260)) == ids_of(refused)


def test_a_refused_message_is_dispatched_only_when_its_destination_has_it(
    node: RabbitMQ, monkeypatch: pytest.MonkeyPatch
):
    """A full queue, and an exchange that routes nowhere. Refused is not an outcome: waiting tasks keep waiting."""
    with Scene(node.url, management_url=node.management_url) as scene:
        full, exchange = full_queue(scene, most=5), nowhere(scene)
        tail = Tail(scene.broker)
        # Those without a delay go straight to their queue, whose refusal is raised.
        scene.broker.check_channels([full, f"{exchange}:some.key"])
        messages = [*scene.messages(full, 3, after=3), scene.message(f"{exchange}:some.key", after=3)]
        ids = [each.id for each in messages]
        scene.broker.schedule(messages)
        wait_for(
            lambda: changes_of(tail, messages) == {each: [Change.REFUSED] for each in ids},
            what="the messages are reported as refused",
        )
        assert scene.broker.find_outcomes(ids, since="") == {}
        with scene.open() as another:
            assert another.find_outcomes(ids, since="") == {}
        assert not sensor_of(scene, ids, monkeypatch).poke({})
        queue = scene.queue()
        with scene.amqp() as amqp:
            amqp.queue_purge(full)
            amqp.queue_bind(queue, exchange, "some.*")
        assert ids_of(scene.collect(full, 3)) == ids_of(messages[:3])
        assert ids_of(scene.collect(queue, 1)) == ids_of(messages[3:])
        wait_for(
            lambda: changes_of(tail, messages) == {each: [Change.REFUSED, Change.DISPATCHED] for each in ids},
            what="the messages are reported as dispatched",
        )
        # A later reader sees it at once.
        with scene.open() as another:
            found = another.find_outcomes(ids, since="")
            assert {entry.change for entry in found.values()} == {Change.DISPATCHED}


@pytest.mark.parametrize("with_management", [True, False])
def test_a_message_whose_queue_was_deleted_is_parked_and_never_reported_as_dispatched(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, with_management: bool
):
    deleted, before = scene.queue(), scene.count(UNROUTABLE)
    with scene.open(**({} if with_management else {"management_url": None})) as broker:
        tail, messages = Tail(broker), scene.messages(deleted, 5, after=LATER)
        broker.schedule(messages)
        with scene.amqp() as amqp:
            amqp.queue_delete(deleted)
        wait_for(
            lambda: changes_of(tail, messages) == {each.id: [Change.PARKED] for each in messages},
            what="the messages are reported as parked",
        )
        found = broker.find_outcomes([each.id for each in messages], since="")
    assert {entry.change for entry in found.values()} == {Change.PARKED}
    assert all("replay-parked" in (entry.reason or "") for entry in found.values())
    assert scene.count(UNROUTABLE) == before + 5
    with pytest.raises(AirflowFailException, match=r"5 of 5 messages were not dispatched .* replay-parked"):
        sensor_of(scene, [each.id for each in messages], monkeypatch).poke({})


def test_parked_messages_arrive_when_they_are_replayed_and_their_channel_is_there(scene: Scene):
    """The journal records it, and messages without a channel stay parked."""
    with scene.amqp() as amqp:
        amqp.queue_purge(UNROUTABLE)
    back, gone = scene.queue(), scene.queue()
    messages = [*scene.messages(back, 3, after=LATER), *scene.messages(gone, 2, after=LATER)]
    tail = Tail(scene.broker)
    scene.broker.schedule(messages)
    with scene.amqp() as amqp:
        amqp.queue_delete(back)
        amqp.queue_delete(gone)
    wait_for(lambda: scene.count(UNROUTABLE) == 5, what="all are parked")
    scene.queue(back)

    assert scene.broker.count_parked_by_channel() == {back: 3, gone: 2}
    with scene.open() as broker:
        assert broker.replay_parked([gone]) == {}
        assert broker.replay_parked() == {back: 3}

    assert ids_of(scene.collect(back, 3)) == ids_of(messages[:3])
    wait_for(lambda: scene.broker.count_parked_by_channel() == {gone: 2}, what="those without a channel stay")
    way_back = [Change.PARKED, Change.REQUEUED, Change.DISPATCHED]
    wait_for(
        lambda: changes_of(tail, messages[:3]) == {each.id: way_back for each in messages[:3]},
        what="the journal records the replay",
    )
    found = scene.broker.find_outcomes([each.id for each in messages], since="")
    assert [found[each.id].change for each in messages] == [Change.DISPATCHED] * 3 + [Change.PARKED] * 2


@pytest.mark.parametrize("after_publish", [True, False])
def test_a_replay_that_ends_in_between_loses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, after_publish: bool
):
    """Published and not yet acknowledged messages arrive twice."""
    channel = scene.queue()
    messages = scene.messages(channel, 2, after=LATER)
    with scene.amqp() as amqp:
        amqp.queue_purge(UNROUTABLE)
    scene.broker.schedule(messages)
    with scene.amqp() as amqp:
        amqp.queue_delete(channel)
    wait_for(lambda: scene.count(UNROUTABLE) == 2, what="both are parked")
    scene.queue(channel)
    with scene.open() as broker:
        with monkeypatch.context() as patched:
            dies = "airflow_delay_provider.brokers.rabbitmq.parked.ParkedMessages.ack"
            patched.setattr(dies if after_publish else f"{Publisher.__module__}.Publisher.publish", _die)
            with pytest.raises(KeyboardInterrupt):
                broker.replay_parked()
        wait_for(lambda: scene.count(UNROUTABLE) == 2, what="both are parked still")
        assert broker.replay_parked() == {channel: 2}
    arrivals = scene.collect(channel, 4 if after_publish else 2)
    assert {arrival.message.id for arrival in arrivals} == {each.id for each in messages}


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_ladder_that_is_forwarding_messages_is_deleted_only_by_force(node: RabbitMQ):
    """20 messages, none of them ready: the exchange behind their rung is gone, so the broker still forwards them."""
    with Scene(node.url, tick=0.2, management_url=node.management_url) as scene:
        topology, channel = scene.topology, scene.queue()
        messages = scene.messages(channel, 20, after=1)
        scene.broker.schedule(messages)
        with scene.amqp() as amqp:
            amqp.exchange_delete(topology.arrival)
        wait_for(lambda: not scene.waiting(), what="no message is ready")

        with pytest.raises(MessagesWaitError, match=r"20 messages wait in 1 queues .* --force"):
            scene.broker.delete_topology()
        with (
            scene.open(management_url=None) as blind,
            pytest.raises(MessagesWaitError, match=r"cannot be counted without management_url .*, or add --force"),
        ):
            blind.delete_topology()

        scene.broker.create_topology([channel])
        # Messages that pass the new exchange before its channel is bound are parked.
        wait_for(lambda: scene.count(channel) + scene.count(UNROUTABLE) == 20, what="all have left the rung")
        scene.broker.replay_parked()
        assert ids_of(scene.collect(channel, 20)) == ids_of(messages)
        # Totals are some seconds old.
        wait_for(lambda: _is_deleted(scene), what="the empty ladder is deleted")


def _is_deleted(scene: Scene) -> bool:
    try:
        return scene.broker.delete_topology() == scene.topology.prefix
    except MessagesWaitError:
        return False


def test_a_message_that_is_routed_nowhere_is_not_confirmed(scene: Scene) -> None:
    """On RabbitMQ: the broker acknowledges it, and only the flag ``mandatory`` tells that no queue has it."""
    message = Message(channel="orders", payload=b"", deliver_at=datetime.now(UTC))
    exchange = nowhere(scene)
    publisher = scene.broker._client.publisher()
    with pytest.raises(DelayError) as raised:
        publisher.publish([message], lambda each: (exchange, "nobody", BasicProperties(message_id=each.id)))
    assert raised.value.unconfirmed == (message.id,)
