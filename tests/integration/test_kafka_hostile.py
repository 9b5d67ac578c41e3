"""Records written to stop a Kafka ladder, and channels that refuse everything: other messages are not delayed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka import Message as Record

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.dispatch.channels import size_alone
from airflow_delay_provider.brokers.kafka.dispatch.transaction import KafkaTransaction
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from tests.acceptance.kafka_soak import read_to_end
from tests.integration.test_kafka_faults import Scene, headers_of, ids_of, in_ms
from tests.kafkas import fresh_topic, require_kafka
from tools.servers import component

pytestmark = pytest.mark.timeout(300)

wait_for = partial(component.wait_for, seconds=40, interval=0.1)

#: Others may be so late on a busy machine, where it was 22 to 50 s; the fuzz measures how late they are.
LATE_MS = 10_000
MANY_BYTES = 20_000_000
#: What a small channel takes.
SMALL_BYTES = 3_000
PARTITIONS_SERVED = (0, 1)


@pytest.fixture(scope="module")
def hostile() -> Iterator[Scene]:
    """A ladder that a dispatcher always serves."""
    with Scene(require_kafka()) as opened, opened.dispatching():
        opened.wait_for_dispatcher()
        yield opened
        assert opened.defects() == []


@dataclass(frozen=True, kw_only=True)
class Written:
    """A record to be written."""

    topic: str
    key: bytes | None = None
    value: bytes | None = b"x"
    headers: dict[str, bytes] = field(default_factory=dict)


def write(scene: Scene, record: Written) -> list[str]:
    """Write it to both partitions, small as long as it is compressed, and return its places."""
    places: list[str] = []

    def note(error: Any, stored: Record) -> None:
        if error is not None:
            raise KafkaException(error)
        places.append(f"{stored.topic()}/{stored.partition()}/{stored.offset()}")

    settings = {"compression.type": "zstd", "message.max.bytes": 100_000_000, "log_level": 0}
    with Producer({"bootstrap.servers": scene.bootstrap, **settings}) as producer:
        for partition in PARTITIONS_SERVED:
            producer.produce(
                record.topic, record.value, record.key, partition, headers=record.headers, on_delivery=note
            )
        producer.flush(60)
    assert len(places) == len(PARTITIONS_SERVED)
    return places


def dead_letters(scene: Scene, places: list[str]) -> list[Record]:
    """Return the dead letters of these records, once each has one."""

    def found() -> list[Record] | None:
        letters = list(read_to_end(scene.bootstrap, [scene.topology.dead]))
        mine = {headers_of(each).get("delay-source", ""): each for each in letters}
        return [mine[position] for position in places] if set(places) <= mine.keys() else None

    return wait_for(found, what=f"dead letters of {places}")


def others_of(scene: Scene, channel: str) -> list[Message]:
    """Messages in both partitions, two seconds long one each 50 ms."""
    return [scene.message(channel, after=1 + 0.05 * n, key=f"k{n}") for n in range(40)]


def require_punctual(scene: Scene, channel: str, others: list[Message]) -> None:
    """See that all others arrive once, and none of them late."""
    arrived = scene.arrived(channel, len(others), seconds=40)
    assert ids_of(arrived) == ids_of(others)
    late_ms = [each.timestamp()[1] - int(headers_of(each)["delay-deliver-at"]) for each in arrived]
    assert max(late_ms) <= LATE_MS, f"late by {sorted(late_ms)[-5:]} ms"


def require_harmless(scene: Scene, record: Written) -> list[Record]:
    """Write records, check that they do not delay others, and return their dead letters."""
    channel = scene.channel()
    places = write(scene, record)
    scene.broker.schedule(others := others_of(scene, channel))
    require_punctual(scene, channel, others)
    return dead_letters(scene, places)


# -- in the inbox --------------------------------------------------------------------------------------------------


def asking(scene: Scene, channel: str = "nowhere", *, key: bytes | None = None, **headers: bytes) -> Written:
    """A record of a plain producer."""
    own = {"delay-channel": channel.encode(), "delay-deliver-after-ms": b"500"}
    return Written(topic=scene.topology.inbox, key=key, headers=own | headers)


def strict_channel(scene: Scene) -> str:
    """A topic that takes no record which was made before it is stored."""
    return fresh_topic(scene.bootstrap, message_timestamp_before_max_ms=0)


INBOX: dict[str, tuple[str, Callable[[Scene], Written]]] = {
    "a large header": ("too many for the ladder", lambda scene: asking(scene, large=bytes(MANY_BYTES))),
    "a large key": ("too many for the ladder", lambda scene: asking(scene, key=bytes(MANY_BYTES))),
    "a large key alone": (
        "too many for the ladder",
        lambda scene: Written(topic=scene.topology.inbox, key=bytes(MANY_BYTES)),
    ),
    "offsets": ("Kafka's own", lambda scene: asking(scene, "__consumer_offsets")),
    "transactions": ("Kafka's own", lambda scene: asking(scene, "__transaction_state")),
    "the inbox": ("belongs to a ladder", lambda scene: asking(scene, scene.topology.inbox)),
    "refused times": ("imestamp", lambda scene: asking(scene, strict_channel(scene))),
}


@pytest.mark.parametrize("what", INBOX)
def test_no_record_in_the_inbox_blocks_others(hostile: Scene, what: str) -> None:
    reason, make = INBOX[what]
    for letter in require_harmless(hostile, make(hostile)):
        assert reason in headers_of(letter)["delay-reason"]


@pytest.mark.parametrize("channel", ["__consumer_offsets", "__transaction_state", "delay.v1.inbox", "own"])
def test_topics_of_kafka_and_of_ladders_are_refused_as_channels(hostile: Scene, channel: str) -> None:
    name = hostile.topology.rung(8_000) if channel == "own" else channel
    before = hostile.ends(hostile.topology.inbox)
    with pytest.raises(InvalidMessageError, match=r"channel: .*(Kafka's own topics|belongs to a ladder); use another"):
        hostile.broker.schedule([hostile.message(name, after=60)])
    with pytest.raises(InvalidMessageError, match="use another topic"):
        hostile.broker.send([hostile.message(name, after=0)])
    assert hostile.ends(hostile.topology.inbox) == before


# -- forged into a rung --------------------------------------------------------------------------------------------


def forged(scene: Scene, *, channel: bytes = b"nowhere", more: Any = None, until_ms: int | None = None) -> Written:
    """An envelope in the rung of two seconds, with what this package would never write."""
    due_ms = in_ms(0.5) if until_ms is None else until_ms
    extra = b"" if more is None else json.dumps(more).encode()
    head = wire._HEAD.pack(1, 0, 0, 0, min(due_ms, 2**62), 0, len(channel), 10, -1, len(extra))
    value = head + channel + b"text/plain" + extra + b"payload"
    return Written(topic=scene.topology.rung(2_000), key=due_ms.to_bytes(8, "big") + uuid4().hex.encode(), value=value)


def forged_large(scene: Scene) -> Written:
    small = forged(scene)
    return Written(topic=small.topic, key=small.key, value=bytes(MANY_BYTES))


RUNG: dict[str, Callable[[Scene], Written]] = {
    "a channel with NUL": lambda scene: forged(scene, channel=b"a\0b"),
    "a long channel": lambda scene: forged(scene, channel=b"a" * 60_000),
    "a channel of Kafka": lambda scene: forged(scene, channel=b"__consumer_offsets"),
    "numbers as headers": lambda scene: forged(scene, more={"headers": {"a": 1}}),
    "a list": lambda scene: forged(scene, more=[1, 2]),
    "half a character": lambda scene: forged(scene, more={"headers": {"a": "\ud800"}}),
    "a time beyond the calendar": lambda scene: forged(scene, until_ms=2**64 - 1),
    "many bytes": forged_large,
}


@pytest.mark.parametrize("what", RUNG)
def test_no_forged_record_in_a_rung_blocks_others(hostile: Scene, what: str) -> None:
    require_harmless(hostile, RUNG[what](hostile))


# -- forged commands -----------------------------------------------------------------------------------------------


def command(scene: Scene, position: RecordPosition, **changes: Any) -> Written:
    """A command that reschedules the record at a position."""
    good = Command(
        id=uuid4().hex,
        change=Change.RESCHEDULED,
        message_id=uuid4().hex,
        channel="nowhere",
        position=position,
        deliver_at_ms=in_ms(1),
        envelope=forged(scene).value or b"",
    )
    value = good.encode()
    length = int.from_bytes(value[:4], "big")
    head = json.dumps(json.loads(value[4 : 4 + length]) | changes).encode()
    value = len(head).to_bytes(4, "big") + head + value[4 + length :]
    return Written(topic=scene.topology.control, key=b"k", value=value)


COMMANDS: dict[str, dict[str, Any]] = {
    "a huge time": {"deliver_at_ms": 10**30},
    "a time beyond the calendar": {"deliver_at_ms": 2**62},
    "a long id": {"id": "x" * 100_000},
    "a long channel": {"channel": "x" * 100_000},
    "no command": {"change": "dispatched"},
}


@pytest.mark.parametrize("what", COMMANDS)
def test_no_forged_command_blocks_others(hostile: Scene, what: str) -> None:
    position = RecordPosition(topic=hostile.topology.inbox, partition=0, offset=10**9)
    require_harmless(hostile, command(hostile, position, **COMMANDS[what]))


@pytest.mark.parametrize("partition", [1, 2, 10**12, -5])
def test_a_command_in_the_wrong_partition_recalls_nothing(hostile: Scene, partition: int) -> None:
    """It names a record of another partition, and one of this partition lies at the same offset."""
    kept = hostile.channel()
    offset = hostile.ends(hostile.topology.inbox)[hostile.topology.inbox, 0]
    headers = {"delay-channel": kept.encode(), "delay-deliver-after-ms": b"1500", "delay-id": uuid4().hex.encode()}
    with Producer({"bootstrap.servers": hostile.bootstrap}) as producer:
        producer.produce(hostile.topology.inbox, b"x", partition=0, headers=headers)
        producer.flush(30)
        wrong = command(hostile, RecordPosition(topic=hostile.topology.inbox, partition=partition, offset=offset))
        producer.produce(wrong.topic, wrong.value, wrong.key, 0)
        producer.flush(30)
    [arrived] = hostile.arrived(kept, 1, seconds=40)
    assert headers_of(arrived)["delay-id"] == headers["delay-id"].decode()


# -- unexpected errors ---------------------------------------------------------------------------------------------


def test_an_unexpected_error_isolates_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction is halved until the record is found; all others of its partition are delivered."""
    produce = KafkaTransaction._produce

    def fail(self: Any, topic: str, value: bytes | None, *arguments: Any, **options: Any) -> None:
        if value is not None and b"unforeseen" in value and not topic.endswith((".dead", ".journal")):
            raise RuntimeError("an error made by this test")
        produce(self, topic, value, *arguments, **options)

    monkeypatch.setattr(KafkaTransaction, "_produce", fail)
    with Scene(require_kafka()) as scene:
        channel = scene.channel()
        others = scene.messages(channel, 200, after=4)
        bad = [scene.message(channel, after=4, payload=b"unforeseen") for _ in range(2)]
        scene.broker.schedule([*others[:100], *bad, *others[100:]])
        with scene.dispatching():
            assert ids_of(scene.arrived(channel, 200, seconds=60)) == ids_of(others)
            dead = scene.dead(each.id for each in bad)
        for each in bad:
            assert "an error made by this test" in headers_of(dead[each.id])["delay-reason"]
            assert dead[each.id].value() == b"unforeseen"
            assert [entry.change for entry in scene.history(each.id, least=2)][-1] is Change.DEAD_LETTERED


# -- channels ------------------------------------------------------------------------------------------------------


def make_compacted(scene: Scene, channel: str) -> None:
    scene.change_settings(channel, cleanup_policy="compact")


def make_small(scene: Scene, channel: str) -> None:
    scene.change_settings(channel, max_message_bytes=1_000)


def delete(scene: Scene, channel: str) -> None:
    scene.delete_channel(channel)


BAD: dict[str, tuple[Callable[[Scene, str], None], str]] = {
    "compacted": (make_compacted, "ey"),
    "small": (make_small, "larg"),
    "deleted": (delete, "Unknown topic or partition"),
}


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("what", BAD)
def test_messages_for_a_bad_destination_make_no_others_late(hostile: Scene, what: str, is_known: bool) -> None:
    """Whether the dispatcher has written to it a moment before, or never."""
    spoil, reason = BAD[what]
    bad, good = hostile.channel(), hostile.channel()
    # The client believes for a while what it has heard of the channel here.
    hostile.broker.check_channels([bad])
    if is_known:
        hostile.broker.schedule([hostile.message(bad, after=0.1, payload=b"x")])
        hostile.arrived(bad, 1)
        hostile.broker.schedule([hostile.message(good, after=0.1)])
        hostile.arrived(good, 1)
        good = hostile.channel()
    lost = [hostile.message(bad, after=1 + 0.01 * n, payload=bytes(2_000)) for n in range(100)]
    others = [hostile.message(good, after=0.5 + 0.02 * n, key=f"k{n}") for n in range(100)]
    spoil(hostile, bad)
    hostile.broker.schedule([*lost, *others])
    require_punctual(hostile, good, others)
    dead = hostile.dead(each.id for each in lost)
    for each in lost:
        assert reason in headers_of(dead[each.id])["delay-reason"]
        assert dead[each.id].value() == each.payload
        assert headers_of(dead[each.id])["delay-channel"] == bad


@pytest.mark.parametrize("key", [None, "k"])
def test_a_message_that_just_fits_into_its_channel_is_delivered_and_a_byte_more_is_dead(
    hostile: Scene, key: str | None
) -> None:
    """Sizes are counted as the broker counts them, so that nothing has to be tried."""
    channel = fresh_topic(hostile.bootstrap, max_message_bytes=SMALL_BYTES)
    fits = [hostile.message(channel, after=1, key=key, payload=bytes(size)) for size in (1, 50, SMALL_BYTES)]
    fits[-1] = replace(fits[-1], payload=bytes(_room_in(fits[-1])))
    lost = hostile.message(channel, after=1, key=key, payload=bytes(len(fits[-1].payload) + 1))
    with Producer({"bootstrap.servers": hostile.bootstrap}) as producer:
        for each in (*fits, lost):
            # A client of this package would refuse what may not fit.
            value = wire.encode_envelope(each, now_ms=in_ms(0))
            producer.produce(hostile.topology.inbox, value, wire.encode_key(in_ms(1), each.id), 0)
        producer.flush(30)
    dead = hostile.dead([lost.id])
    assert f"{SMALL_BYTES + 1} bytes are too large" in headers_of(dead[lost.id])["delay-reason"]
    assert ids_of(hostile.arrived(channel, len(fits))) == ids_of(fits)


def _room_in(message: Message) -> int:
    """How many bytes its payload may have."""
    for payload in range(SMALL_BYTES, 0, -1):
        value = wire.encode_envelope(replace(message, payload=bytes(payload)), now_ms=in_ms(0))
        if size_alone(wire.Envelope(wire.encode_key(in_ms(1), message.id), value)) == SMALL_BYTES:
            return payload
    raise AssertionError


@pytest.mark.parametrize("what", BAD)
def test_a_destination_that_becomes_bad_while_it_is_written_to_makes_no_others_late(hostile: Scene, what: str) -> None:
    """The dispatcher can know of it only from a transaction that fails."""
    spoil, _ = BAD[what]
    bad, good = hostile.channel(), hostile.channel()
    lost = [hostile.message(bad, after=0.5 + 0.02 * n, payload=bytes(2_000)) for n in range(125)]
    # Due when the destination is bad for sure, however busy the machine is.
    lost += [hostile.message(bad, after=10, payload=bytes(2_000)) for _ in range(25)]
    others = [hostile.message(good, after=0.5 + 0.02 * n, key=f"k{n}") for n in range(200)]
    hostile.broker.schedule([*lost, *others])
    wait_for(lambda: sum(hostile.ends(bad).values()) > 20, what="messages arrive", interval=0.02)
    spoil(hostile, bad)
    require_punctual(hostile, good, others)
    hostile.dead(each.id for each in lost[-25:])
    # The broker knows of no transaction that began with a topic which is gone: that costs no dispatcher its partitions.
    assert not [each for each in hostile.failures if "invalid state" in str(each)]
