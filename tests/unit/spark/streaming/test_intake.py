from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import Record
from airflow_delay_provider.brokers.kafka.journal import decode_entries
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.streaming.frames import Frame, Kind
from airflow_delay_provider.spark.streaming.intake import Begun, Intake
from airflow_delay_provider.spark.streaming.processor import recall
from airflow_delay_provider.spark.streaming.routing import CLOCK, PASSING, Routing

TOPOLOGY = Topology(name="t")
ROUTING = Routing(shards=4, bucket_ms=500)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def message(**given: object) -> Message:
    return Message(**{"id": "m", "channel": "c", "payload": b"p", "deliver_at": NOW, **given})  # type: ignore[arg-type]


def record_of(sent: Message, offset: int = 0) -> Record:
    key = wire.encode_key(ceil_ms(sent.deliver_at), sent.id)
    return Record(offset, 1, key, wire.encode_envelope(sent, now_ms=1))


def command_of(
    sent: Message, position: RecordPosition, change: Change = Change.CANCELLED, until_ms: int = 0
) -> Command:
    record = record_of(sent)
    envelope = wire.Envelope(record.key or b"", record.value or b"")
    moved = wire.with_deliver_at(record.value or b"", until_ms) if until_ms else b""
    return Command(
        id="command",
        change=change,
        message_id=sent.id,
        channel=sent.channel,
        position=position,
        deliver_at_ms=until_ms or ceil_ms(sent.deliver_at),
        envelope=moved,
        held_until_ms=ceil_ms(sent.deliver_at),
        order=wire.order_of(envelope),
    )


def read(topic: str, record: Record, *, begun: Begun | None = None) -> dict[tuple[int, int], list[Frame]]:
    intake = Intake(topology=TOPOLOGY, routing=ROUTING, begun={(topic, 1): begun or Begun()})
    found = intake.read([(topic, 1, record)])
    del found[0, CLOCK]
    return found


@pytest.mark.parametrize("due_ms", [0, 1, 499, 500, 501, 10**13])
def test_a_bucket_ends_when_its_messages_are_due_or_after(due_ms: int):
    bucket = ROUTING.bucket_of(due_ms)
    assert due_ms <= ROUTING.ends_ms(bucket) < due_ms + ROUTING.bucket_ms


@pytest.mark.parametrize(("given", "option"), [({"shards": 0}, "--shards"), ({"bucket_ms": 1}, "--bucket")])
def test_settings_out_of_range_are_refused_by_name(given: dict[str, int], option: str):
    with pytest.raises(ConfigurationError, match=option):
        Routing(**given)


def test_messages_of_one_channel_and_key_share_a_shard():
    places = {next(iter(read(TOPOLOGY.inbox, record_of(message(id=f"m{n}", key="k")))))[0] for n in range(20)}
    others = {next(iter(read(TOPOLOGY.inbox, record_of(message(id=f"m{n}")))))[0] for n in range(50)}
    assert len(places) == 1
    assert others == set(range(4))


def test_a_command_finds_the_shard_and_the_bucket_of_its_message():
    sent = message(key="k", deliver_at=NOW + timedelta(seconds=7))
    position = RecordPosition(topic=TOPOLOGY.inbox, partition=1, offset=9)
    (place,) = read(TOPOLOGY.inbox, record_of(sent))
    (found,) = read(TOPOLOGY.control, Record(0, 1, b"m", command_of(sent, position).encode()))
    assert found == place


def test_a_command_of_an_earlier_version_becomes_a_dead_letter():
    position = RecordPosition(topic=TOPOLOGY.inbox, partition=1, offset=9)
    old = Command(
        id="c", change=Change.CANCELLED, message_id="m", channel="c", position=position, deliver_at_ms=1
    ).encode()
    ((place, (frame,)),) = read(TOPOLOGY.control, Record(0, 1, b"m", old)).items()
    assert place[1] == PASSING
    assert frame.topic == TOPOLOGY.dead
    assert b"until when its record is held" in dict(frame.headers)["delay-reason"]


@pytest.mark.parametrize(
    ("topic", "record"),
    [
        (TOPOLOGY.inbox, Record(0, 1, None, b"no key")),
        (TOPOLOGY.inbox, Record(0, 1, b"123456789", b"no envelope")),
        (TOPOLOGY.inbox, Record(0, 1, None, b"", [("delay-channel", b"__offsets")])),
        (TOPOLOGY.rung(2000), Record(0, 1, b"123456789", None)),
        (TOPOLOGY.control, Record(0, 1, None, None)),
    ],
)
def test_any_other_record_becomes_a_dead_letter_with_the_reason(topic: str, record: Record):
    ((place, (frame,)),) = read(topic, record).items()
    assert (place[1], frame.kind, frame.topic) == (PASSING, Kind.WRITE, TOPOLOGY.dead)
    assert dict(frame.headers)["delay-reason"]


def test_records_that_a_dispatcher_has_done_are_skipped_and_those_it_has_begun_are_not_journaled_again():
    begun = Begun(next=10, open=frozenset({4}), recalled=frozenset({12}))
    assert read(TOPOLOGY.inbox, record_of(message(), 3), begun=begun) == {}
    kinds = {
        offset: next(iter(read(TOPOLOGY.inbox, record_of(message(), offset), begun=begun).values()))[0].kind
        for offset in (4, 10, 12)
    }
    assert kinds == {4: Kind.HELD, 10: Kind.ACCEPTED, 12: Kind.WRITE}


def held(sent: Message) -> Frame:
    record = record_of(sent)
    return Frame(Kind.HELD, TOPOLOGY.inbox, 1, 9, ceil_ms(sent.deliver_at), record.key, record.value)


def recalled(state: set[tuple[str, int, int]], command: Command) -> tuple[list[object], list[Frame]]:
    frame = Frame(Kind.COMMAND, TOPOLOGY.control, 1, 0, 0, None, command.encode())
    frames = list(recall(state, frame, TOPOLOGY, 5))
    entries = [entry for each in frames if each.kind is Kind.ENTRY for entry in decode_entries(each.value or b"")]
    return [each.change or each.result for each in entries], [each for each in frames if each.kind is Kind.WRITE]


def test_a_recall_takes_the_message_once_and_is_refused_after_that():
    sent, state = message(), {held(message()).position}
    command = command_of(sent, RecordPosition(topic=TOPOLOGY.inbox, partition=1, offset=9))
    (answer, change), written = recalled(state, command)
    assert (getattr(answer, "accepted", None), change, written, state) == (True, Change.CANCELLED, [], set())
    (answer,), written = recalled(state, command)
    assert (getattr(answer, "accepted", None), written) == (False, [])


def test_a_rescheduled_message_continues_in_a_rung():
    sent = message()
    until_ms = ceil_ms(NOW) + 5_000
    command = command_of(
        sent, RecordPosition(topic=TOPOLOGY.inbox, partition=1, offset=9), Change.RESCHEDULED, until_ms
    )
    _, (written,) = recalled({held(sent).position}, command)
    assert TOPOLOGY.hold_of(written.topic)
    assert written.partition == 1
    assert wire.held_until_ms(written.key or b"") == until_ms


def test_a_command_for_another_partition_is_refused():
    sent, state = message(), {held(message())._replace(partition=0).position}
    (answer,), _ = recalled(state, command_of(sent, RecordPosition(topic=TOPOLOGY.inbox, partition=0, offset=9)))
    assert (getattr(answer, "accepted", None), len(state)) == (False, 1)
