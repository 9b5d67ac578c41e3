"""The ladder as objects on a real broker: created, verified, deleted, side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_delay_provider.brokers.rabbitmq import client
from airflow_delay_provider.brokers.rabbitmq.names import JOURNAL, UNROUTABLE
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, UnknownChannelError
from tests.integration.rabbitmq_scene import ON_TIME, Scene, ids_of, wait_for
from tests.rabbits import fresh_vhost, manage, require_management


@pytest.fixture
def url() -> Iterator[str]:
    with fresh_vhost() as url:
        yield url


@pytest.fixture
def scene(url: str) -> Iterator[Scene]:
    with Scene(url, management_url=require_management()) as opened:
        yield opened


def problems(scene: Scene) -> list[str]:
    return [issue.text for issue in scene.broker.verify_topology() if issue.is_problem]


def test_a_ladder_can_be_created_twice_and_has_nothing_wrong(scene: Scene):
    """C5, C12"""
    channel = scene.queue()
    scene.broker.schedule(scene.messages(channel, 1, after=60))
    before = scene.waiting()
    assert scene.broker.create_topology([channel]) == scene.topology.prefix
    with scene.open() as another:
        assert another.create_topology() == scene.topology.prefix
    assert problems(scene) == []
    assert scene.waiting() == before


def test_verify_finds_deleted_objects_and_create_restores_them(scene: Scene):
    """C12"""
    topology = scene.topology
    rung, level = topology.rung(topology.ladder.holds_ms[3]), topology.level(2)
    with scene.amqp() as amqp:
        amqp.queue_delete(rung)
        amqp.exchange_delete(level)
        amqp.exchange_unbind(topology.exit, topology.dispatch)
        amqp.queue_delete(JOURNAL)
    found = "\n".join(problems(scene))
    assert f"queue {rung} is missing; run `airflow delay topology create`" in found
    assert f"exchange {level} is missing" in found
    assert f"queue {JOURNAL} is missing" in found
    assert f"{topology.dispatch} is not bound to {topology.exit}" in found
    scene.broker.create_topology()
    assert problems(scene) == []


def test_verify_finds_queues_with_other_arguments_and_unroutable_messages(scene: Scene):
    """C12"""
    rung = scene.topology.rung(scene.topology.ladder.holds_ms[0])
    with scene.amqp() as amqp:
        amqp.queue_delete(rung)
        amqp.queue_declare(rung, durable=True, arguments={"x-queue-type": "quorum", "x-message-ttl": 5})
        amqp.confirm_delivery()
        amqp.basic_publish("", UNROUTABLE, b"lost its way")
    found = problems(scene)
    assert any(f"queue {rung} has other arguments" in problem for problem in found)
    assert any(f"1 messages had no route and are parked in queue {UNROUTABLE}" in problem for problem in found)


@pytest.mark.parametrize("definition", [{"message-ttl": 1000}, {"expires": 60_000}, {"max-length": 5}])
def test_verify_finds_policies_that_would_harm(scene: Scene, definition: dict[str, Any]):
    """C11, C12"""
    vhost = scene.broker.config.vhost
    policy = {"pattern": ".*", "definition": definition, "apply-to": "queues"}
    manage("PUT", f"policies/{vhost}/harmful", policy)
    [name] = definition
    wait_for(
        lambda: [each for each in problems(scene) if f"a policy sets {name} on queue delay.v1" in each],
        what="the policy is found",
    )
    manage("PUT", f"policies/{vhost}/harmful", {**policy, "pattern": "^(?!delay\\.v1)"})
    wait_for(lambda: not problems(scene), what="a policy that leaves the ladder alone is fine")


def test_verify_says_what_it_could_not_check_and_names_a_wrong_management_url(url: str):
    with Scene(url) as scene:
        [unseen] = problems(scene)
        assert "without management_url, messages are reported as dispatched" in unseen
        assert any("set management_url" in issue.text for issue in scene.broker.verify_topology())
        with scene.open(management_url="http://guest:s3cret@127.0.0.1:1") as broker:
            with pytest.raises(BrokerError, match="management_url") as refused:
                broker.verify_topology()
            assert "s3cret" not in str(refused.value)


def test_a_ladder_on_which_messages_wait_is_deleted_only_by_force(scene: Scene):
    """C12"""
    channel = scene.queue()
    scene.broker.schedule(scene.messages(channel, 3, after=3600))
    with pytest.raises(ConfigurationError, match=r"3 messages wait in . queues? .* --force"):
        scene.broker.delete_topology()
    assert problems(scene) == []
    assert scene.broker.delete_topology(even_if_messages_wait=True) == scene.topology.prefix
    with scene.amqp() as amqp:
        for shared in (JOURNAL, UNROUTABLE):
            amqp.queue_declare(shared, passive=True)
    assert problems(scene) == [
        f"the ladder {scene.topology.prefix} does not exist; run `airflow delay topology create`"
    ]
    scene.broker.delete_topology()
    # The next message makes it again.
    message = scene.message(channel, after=0.1)
    scene.broker.schedule([message])
    assert ids_of(scene.collect(channel, 1)) == [message.id]
    assert problems(scene) == []


def test_ladders_of_other_ticks_stand_side_by_side(url: str):
    """C5, C6"""
    with (
        Scene(url, tick=0.1) as one,
        Scene(url, tick=0.5) as two,
        Scene(url, tick=0.1, journal=False) as three,
    ):
        scenes = [one, two, three]
        assert len({scene.topology.prefix for scene in scenes}) == 3
        channel = one.queue()
        messages = [scene.message(channel, after=0.7) for scene in scenes]
        for scene, message in zip(scenes, messages, strict=True):
            scene.broker.schedule([message])
        assert ids_of(one.collect(channel, 3)) == ids_of(messages)
        # One journal records all of them.
        wait_for(
            lambda: (
                set(one.broker.find_outcomes([each.id for each in messages], since=""))
                == {each.id for each in messages[:2]}
            ),
            what="two outcomes",
        )
        two.broker.delete_topology(even_if_messages_wait=True)
        more = one.message(channel, after=0.2)
        one.broker.schedule([more])
        [arrival] = one.collect(channel, 1)
        assert arrival.message.id == more.id
        assert arrival.lateness < ON_TIME


def test_a_ladder_that_was_deleted_under_a_client_is_created_again(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """C12: the call that finds it gone names the ids; the next one works, and its messages find their channel."""
    monkeypatch.setattr(client, "TRUST_CHANNEL_SECONDS", 3600)
    channel = scene.queue()
    with scene.open() as broker:
        broker.schedule([scene.message(channel, after=0)])
        scene.broker.delete_topology(even_if_messages_wait=True)
        lost = scene.message(channel, after=0)
        with pytest.raises(BrokerError) as failed:
            broker.schedule([lost])
        assert failed.value.unconfirmed == (lost.id,)
        again = scene.message(channel, after=0)
        broker.schedule([again])
        assert again.id in {arrival.message.id for arrival in scene.collect(channel, 2)}


def test_a_ladder_that_was_deleted_is_not_taken_for_a_missing_channel(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """C12: a dispatcher would give its messages up."""
    monkeypatch.setattr(client, "TRUST_CHANNEL_SECONDS", 0)
    channel = scene.queue()
    with scene.open() as broker:
        broker.check_channels([channel])
        scene.broker.delete_topology(even_if_messages_wait=True)
        message = scene.message(channel, after=0.1)
        broker.schedule([message])
        assert ids_of(scene.collect(channel, 1)) == [message.id]
        with pytest.raises(UnknownChannelError, match="queue 'nowhere' does not exist"):
            broker.check_channels(["nowhere"])


def test_verify_finds_a_queue_that_stands_still_and_create_wakes_it(scene: Scene):
    """C12, C14: held messages are neither ready nor unacknowledged, so AMQP does not show them."""
    channel, topology = scene.queue(), scene.topology
    scene.broker.check_channels([channel])
    with scene.amqp() as amqp:
        amqp.exchange_delete(topology.arrival)
    messages = scene.messages(channel, 3, after=1)
    scene.broker.schedule(messages)
    stands = re.compile(r"queue delay\.v1\..*\.rung\.\d+ms is stuck: it has \d expired messages")
    wait_for(lambda: any(stands.match(problem) for problem in problems(scene)), what="the queue is found")
    scene.broker.create_topology([channel])
    assert ids_of(scene.collect(channel, 3)) == ids_of(messages)
