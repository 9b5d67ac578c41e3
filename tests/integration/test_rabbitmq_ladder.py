"""Messages on a real ladder: their routes, arrival times and refusals."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pika
import pytest

from airflow_delay_provider.brokers.consumer import Consumer, ConsumerConfig
from airflow_delay_provider.brokers.port import Outcome
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.journal import JournalReader
from airflow_delay_provider.domain.arguments import Limits, OnConflict
from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import (
    DeferMessage,
    InvalidMessageError,
    LifecycleError,
    PayloadError,
    TooFarError,
    UnknownChannelError,
)
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from tests.contract.journal import Tail
from tests.integration.rabbitmq_scene import ON_TIME, Scene, ids_of, wait_for
from tests.ladder_path import path_of
from tests.rabbits import counted_looks, fresh_vhost

THREE_YEARS = timedelta(days=3 * 365)


@pytest.fixture(scope="module")
def scene(rabbitmq_version: str) -> Iterator[Scene]:
    with fresh_vhost() as url, Scene(url) as opened:
        yield opened


# -- delays --------------------------------------------------------------------------------------------------------


def test_a_short_delay_behind_long_ones_is_not_held_up(scene: Scene):
    """C4, C6, C9, C14"""
    source, channel = random.Random(1), scene.queue()
    # None of them moves while other tests of this ladder look at it.
    scene.broker.schedule([scene.message(channel, after=7200)])
    scene.broker.schedule([scene.message(channel, after=source.uniform(7200, 100_000)) for _ in range(1000)])
    short = [scene.message(channel, after=0.5 * n) for n in (5, 1, 3)]
    scene.broker.schedule(short)
    arrivals = scene.collect(channel, 3)
    assert ids_of(arrivals) == ids_of(short)
    assert [arrival.message.id for arrival in arrivals] == [short[1].id, short[2].id, short[0].id]
    assert max(arrival.lateness for arrival in arrivals) < ON_TIME
    assert scene.broker.receive(channel) == []


def test_every_delay_of_up_to_three_digits_is_kept_and_none_is_early(scene: Scene):
    """C5, C7, C8, C9"""
    channel = scene.queue()
    # The digits are those of radix 16: 0x111 is the first number with three that are not zero.
    messages = [scene.message(channel, after=0.1 * ticks) for ticks in (*range(1, 60), 0x101, 0x110, 0x111)]
    scene.broker.schedule(messages)
    arrivals = scene.collect(channel, len(messages))
    assert ids_of(arrivals) == ids_of(messages)
    assert max(arrival.lateness for arrival in arrivals) < ON_TIME


def test_three_years_and_one_tick_take_different_ways(scene: Scene):
    """C5, C9, C10"""
    channel, before = scene.queue(), scene.waiting()
    far = Message(channel=channel, payload=b"far", deliver_at=datetime.now(UTC) + THREE_YEARS)
    near = scene.message(channel, after=0.1)
    scene.broker.schedule([far, near])
    assert [arrival.message.id for arrival in scene.collect(channel, 1)] == [near.id]
    first_rest = path_of(scene.topology.ladder, THREE_YEARS // timedelta(milliseconds=1))[0]
    assert first_rest > THREE_YEARS / timedelta(milliseconds=1) / 2
    wait_for(
        lambda: scene.waiting() - before == Counter({scene.topology.rung(first_rest): 1}),
        what="only the far one waits, in the queue of its first digit",
    )


def test_the_longest_delay_is_accepted_and_more_is_refused(scene: Scene):
    """A30, C10"""
    channel = scene.queue()
    longest = timedelta(milliseconds=scene.topology.max_delay_ms)
    with RabbitMQBroker(scene.broker.config, limits=Limits(max_delay=longest * 2)) as broker:
        just_fits = datetime.now(UTC) + longest - timedelta(seconds=1)
        [receipt] = broker.schedule([Message(channel=channel, payload=b"", deliver_at=just_fits)])
        assert receipt.outcome is Outcome.SCHEDULED
        too_far = Message(channel=channel, payload=b"", deliver_at=just_fits + timedelta(seconds=60))
        with scene.unchanged(), pytest.raises(TooFarError, match=r'^deliver_at: .* or hold="ledger"$') as refused:
            broker.schedule([too_far])
    assert refused.value.field == "deliver_at"


def test_more_than_max_delay_of_the_connection_is_refused_with_the_remedy(scene: Scene):
    """A30"""
    message = Message(channel=scene.queue(), payload=b"", deliver_at=datetime.now(UTC) + timedelta(days=4000))
    with scene.unchanged(), pytest.raises(TooFarError, match=r"^deliver_at: .* raise max_delay in the connection$"):
        scene.broker.schedule([message])


def test_a_message_cannot_be_requeued_for_longer_than_the_ladder_holds(scene: Scene):
    """A30: it stays in hand."""
    channel = scene.queue()
    scene.broker.send([scene.message(channel, after=0)])
    (delivery,) = wait_for(lambda: scene.broker.receive(channel), what="the message")
    for put_back in (scene.broker.requeue, lambda held, delay: scene.broker.release([held], delay=delay)):
        with scene.unchanged(), pytest.raises(TooFarError, match=r"^deliver_at: .* the longest delay of a ladder"):
            put_back(delivery, timedelta(days=5000))
    scene.broker.ack([delivery])


# -- destinations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["topic", "direct", "fanout"])
def test_a_message_reaches_an_exchange_with_exactly_its_routing_key(scene: Scene, kind: str):
    """C3"""
    exchange, key, queue = f"exchange-{uuid4().hex}", "eu.orders.created", scene.queue()
    other = scene.queue()
    with scene.amqp() as amqp:
        amqp.exchange_declare(exchange, kind, durable=True)
        amqp.queue_bind(queue, exchange, {"topic": "eu.#", "direct": key, "fanout": ""}[kind])
        if kind != "fanout":
            amqp.queue_bind(other, exchange, "orders.created")
        message = scene.message(f"{exchange}:{key}", after=0.3, headers={"own": "kept"}, key="k", priority=3)
        scene.broker.schedule([message])
        method, properties, body = wait_for_get(amqp, queue)
        amqp.basic_ack(method.delivery_tag)
        assert amqp.basic_get(other)[0] is None
    assert (method.exchange, method.routing_key, body) == (exchange, key, message.payload)
    assert properties.message_id == message.id
    assert properties.headers["own"] == "kept"


def test_channels_whose_names_share_words_do_not_mix(scene: Scene):
    name = uuid4().hex
    channels = [scene.queue(each) for each in (name, f"eu.{name}", f"{name}.eu", f"0.{name}", f"0.0.{name}")]
    messages = [scene.message(channel, after=after) for channel in channels for after in (0, 0.1, 1.7)]
    scene.broker.schedule(messages)
    for channel in channels:
        arrivals = scene.collect(channel, 3)
        assert ids_of(arrivals) == ids_of(each for each in messages if each.channel == channel)
        assert scene.broker.receive(channel) == []


@pytest.mark.parametrize("missing", ["queue-that-is-not-there", "exchange-that-is-not-there:some.key"])
def test_a_destination_that_is_missing_is_named_and_nothing_is_published(scene: Scene, missing: str):
    """B3, B30"""
    name = missing.partition(":")[0]
    batch = [*scene.messages(scene.queue(), 2, after=0.2), scene.message(missing, after=0.2)]
    with scene.unchanged(), pytest.raises(UnknownChannelError, match=f"^channel: .*{name}.* does not exist") as refused:
        scene.broker.schedule(batch)
    assert refused.value.field == "channel"
    # The connection is as good as before.
    scene.broker.schedule(batch[:2])
    assert ids_of(scene.collect(batch[0].channel, 2)) == ids_of(batch[:2])


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"headers": {"x-death": "1"}}, InvalidMessageError, "headers"),
        ({"headers": {"delay-channel": "elsewhere"}}, InvalidMessageError, "headers"),
        ({"headers": {"BCC": "elsewhere"}}, InvalidMessageError, "headers"),
        ({"headers": {"large": "x" * 200_000}}, InvalidMessageError, "headers"),
        ({"headers": {"n" * 300: "x"}}, InvalidMessageError, "headers"),
        ({"key": "k" * 200_000}, InvalidMessageError, "headers"),
        ({"id": "é" * 200}, InvalidMessageError, "message_id"),
        ({"payload": b"x" * 2_000_000}, PayloadError, "payload"),
    ],
)
def test_messages_that_amqp_cannot_carry_are_refused_and_nothing_is_published(
    scene: Scene, options: dict[str, Any], error: type[InvalidMessageError], field: str
):
    channel = scene.queue()
    good = scene.message(channel, after=0.1)
    with scene.unchanged(), pytest.raises(error) as refused:
        scene.broker.schedule([good, scene.message(channel, after=0.1, **options)])
    assert refused.value.field == field
    assert scene.broker.receive(channel) == []


def test_the_longest_id_and_large_headers_travel_unchanged(scene: Scene):
    channel = scene.queue()
    message = scene.message(channel, after=0.2, id="i" * 255, headers={"large": "ü" * 40_000, "empty": ""}, key="é")
    scene.broker.schedule([message])
    assert [arrival.message for arrival in scene.collect(channel, 1)] == [message]


@pytest.mark.parametrize(
    "recall",
    [
        lambda broker: broker.cancel(["m1"]),
        lambda broker: broker.reschedule(["m1"], datetime.now(UTC)),
        lambda broker: broker.expedite(["m1"]),
    ],
)
def test_a_message_on_the_ladder_is_not_called_back_and_the_remedy_is_named(
    scene: Scene, recall: Callable[[RabbitMQBroker], None]
):
    """C13"""
    with scene.unchanged(), pytest.raises(LifecycleError, match='hold="ledger"') as refused:
        recall(scene.broker)
    assert refused.value.message_id == "m1"


@pytest.mark.parametrize("policy", [OnConflict.FAIL, OnConflict.REPLACE])
def test_conflict_policies_that_cannot_be_kept_are_refused(scene: Scene, policy: OnConflict):
    """A28, C13"""
    message = scene.message(scene.queue(), after=0.1)
    with scene.unchanged(), pytest.raises(InvalidMessageError, match='use on_conflict="keep", or hold="ledger"'):
        scene.broker.schedule([message], on_conflict=policy)


# -- consumers -----------------------------------------------------------------------------------------------------


def test_a_message_goes_round_the_ladder_twenty_times(scene: Scene):
    """A1, A14, A15, A17, A23, C1, C2, C3: RabbitMQ drops what it takes for a cycle of dead letters."""
    channel = scene.queue()
    message = scene.message(channel, after=0.1, headers={"own": "kept"})
    scene.broker.schedule([message])
    for handled in range(20):
        [delivery] = wait_for(lambda: scene.broker.receive(channel), what=f"round {handled}")
        assert datetime.now(UTC) >= delivery.message.deliver_at
        assert (delivery.message.id, delivery.message.handled_count) == (message.id, handled)
        assert delivery.message.headers == {"own": "kept"}
        scene.broker.requeue(delivery, timedelta(milliseconds=100), reason=f"round {handled}")
    [last] = scene.collect(channel, 1)
    assert last.message.handled_count == 20
    assert scene.broker.receive(channel) == []


def test_a_deferred_message_backs_off_and_is_dead_lettered_after_max_handled(scene: Scene):
    """A1, A2, A14, A16, A23, A24, A25, C1"""
    channel, seen = scene.queue(), list[int]()

    def fail(message: Message) -> None:
        seen.append(message.handled_count)
        raise DeferMessage(0.1 * 2**message.handled_count)

    message = scene.message(channel, after=0.1)
    scene.broker.schedule([message])
    connections = count_connections()
    with scene.open() as broker:
        consumer = Consumer(broker, channel, fail, config=ConsumerConfig(max_handled=3))
        wait_for(lambda: scene.count(channel), what="the message")
        assert broker._client._publisher is None, "a consumer publishes only once it puts something back"
        consumed = consumer.run(limit=4, timeout=timedelta(seconds=60))
        assert count_connections() == connections + 1
    wait_for(lambda: count_connections() == connections, what="what the consumer opened is closed with it")
    assert seen == [0, 1, 2, 3]
    assert (consumed.deferred, consumed.dead_lettered) == (3, 1)
    [dead] = scene.collect(f"{channel}.dead", 1)
    assert (dead.message.id, dead.message.payload, dead.message.handled_count) == (message.id, message.payload, 3)


def test_heartbeats_go_on_while_a_handler_blocks_which_keeps_its_connection_and_its_message(scene: Scene):
    """A2, A17, C11"""
    channel, handled = scene.queue(), list[str]()
    # The server ends a connection after 12 s of silence, which a busy machine does not reach.
    with scene.open(heartbeat=6) as broker:
        first, second = scene.messages(channel, 2, after=0)
        broker.schedule([first, second])
        connection: Any = broker._client.connection()._connection

        def beats() -> int:
            sent: int = connection._heartbeat_checker._heartbeat_frames_sent
            return sent

        def sit(message: Message) -> None:
            handled.append(message.id)
            if message.id == first.id:
                before = beats()
                wait_for(lambda: beats() >= before + 2, what="two heartbeats")

        consumed = Consumer(broker, channel, sit).run(limit=2, timeout=timedelta(seconds=60))
    assert consumed.handled == 2
    assert handled == [first.id, second.id]
    with scene.amqp() as amqp:
        assert amqp.queue_declare(channel, passive=True).method.message_count == 0


@pytest.mark.parametrize(
    "properties",
    [
        pika.BasicProperties(),
        pika.BasicProperties(headers={"count": 7, "big": 2**60, "flag": True, "none": None, "price": Decimal("0.5")}),
        pika.BasicProperties(headers={"table": {"a": [1, {"b": "c"}]}, "raw": b"\xff\x00", "at": datetime.now(UTC)}),
        pika.BasicProperties(headers={"nul": "a\0b", "delay-deliver-at": "soon", "delay-handled-count": "many"}),
        pika.BasicProperties(headers={"delay-deliver-at": 2**62, "delay-origin": "[]", "delay-channel": "no such/ü"}),
        pika.BasicProperties(headers={"delay-key": 5, "delay-change": ["x"], "x-death": "not a list"}),
        pika.BasicProperties(message_id="line\nbreak", content_type="", priority=200),
        pika.BasicProperties(message_id=b"\xff\xfe\x00binary"),
        pika.BasicProperties(content_type=b"\xff", message_id="ok"),
        pika.BasicProperties(headers={b"\xff\xfe": b"\xfe"}),
        pika.BasicProperties(content_type="x" * 255, message_id="y" * 255, correlation_id="z"),
    ],
)
def test_messages_of_other_publishers_can_be_received_requeued_and_dead_lettered(
    scene: Scene, properties: pika.BasicProperties
):
    """A15, A25"""
    channel, body = scene.queue(), bytes(range(256))
    with scene.amqp() as amqp:
        amqp.basic_publish("", channel, body, properties)
    with counted_looks():
        [seen] = wait_for(lambda: scene.broker.peek(channel), what="a message to look at")
    assert seen.payload == body
    [delivery] = wait_for(lambda: scene.broker.receive(channel), what="the message")
    assert (delivery.message.payload, delivery.message.channel) == (body, channel)
    scene.broker.requeue(delivery, timedelta(milliseconds=100), reason="again")
    [again] = wait_for(lambda: scene.broker.receive(channel), what="the message once more")
    assert (again.message.payload, again.message.handled_count) == (body, 1)
    scene.broker.dead_letter(again, channel=f"{channel}.dead", reason="enough")
    assert scene.collect(f"{channel}.dead", 1)[0].message.payload == body


def test_the_journal_records_the_same_changes_for_every_message(scene: Scene):
    """D11"""
    channel = scene.queue()
    tail, now = Tail(scene.broker), from_ms(floor_ms(datetime.now(UTC)))
    position = tail.position
    messages = [
        Message(channel=channel, payload=b"", deliver_at=now + timedelta(seconds=after)) for after in (0, 0.1, 0.5, 1.7)
    ]
    scene.schedule_in_time(messages, now=now)
    scene.collect(channel, 4)
    wait_for(
        lambda: len(scene.broker.find_outcomes([each.id for each in messages], since=position)) == 4,
        what="all outcomes",
    )

    def recorded() -> Counter[Change]:
        tail.read()
        return Counter(entry.change for entry in tail.of(messages))

    wait_for(lambda: recorded() == {Change.SCHEDULED: 3, Change.DISPATCHED: 4}, what="all records")


def wait_for_get(amqp: Any, queue: str) -> tuple[Any, pika.BasicProperties, bytes]:
    def get() -> tuple[Any, pika.BasicProperties, bytes] | None:
        found = amqp.basic_get(queue)
        return found if found[0] is not None else None

    return wait_for(get, what=f"a message in {queue}")


def count_connections() -> int:
    return sum(thread.name == "delay-rabbitmq" for thread in threading.enumerate())


def test_outcomes_since_many_positions_are_found_in_one_look_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: each id counts from its own position on, as RabbitMQ lets an id be used again."""
    channel = scene.queue()
    first, second = scene.message(channel, after=0.1), scene.message(channel, after=0.1)
    begin = scene.broker.journal_end()
    scene.broker.schedule([first, second])
    scene.collect(channel, 2)
    ids = [first.id, second.id]
    wait_for(lambda: len(scene.broker.find_outcomes(ids, since=begin)) == 2, what="both outcomes are recorded")
    after = scene.broker.find_outcomes(ids, since=begin)[first.id].position
    looks: list[int] = []
    scan = JournalReader._scan

    def counted(self: JournalReader, start: Any, wanted: Any) -> Any:
        looks.append(len(wanted))
        return scan(self, start, wanted)

    monkeypatch.setattr(JournalReader, "_scan", counted)
    with scene.open() as another:
        found = another.find_outcomes_of_each({first.id: after, second.id: begin, "unknown": begin})
    assert list(found) == [second.id]
    assert looks == [3]
    assert found[second.id].message is None
