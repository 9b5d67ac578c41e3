"""What goes wrong around a ladder in Kafka: brokers that stop, channels that vanish, records of strangers."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as Record
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
)

from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.journal import JournalReader
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.exceptions import (
    BrokerError,
    ConfigurationError,
    LifecycleError,
    PayloadError,
    UnknownChannelError,
)
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry
from airflow_delay_provider.domain.message import Message
from tests.acceptance.kafka_soak import Dispatcher, read_to_end
from tests.given import do_without
from tests.kafkas import delete_ladder, fresh_topic, private_broker, produce, read_all, require_kafka
from tools.servers import component, process
from tools.servers.kafka import Kafka

# Brokers of a test's own take their time to start on a busy machine.
pytestmark = pytest.mark.timeout(600)

#: Where messages of some seconds rest.
SHORT_HOLDS_MS = (2_000, 4_000, 6_000, 8_000)

wait_for = partial(component.wait_for, seconds=90, interval=0.03)


class Scene:
    """One ladder. Tests that share it use channels of their own."""

    def __init__(self, bootstrap: str, **settings: Any) -> None:
        self.bootstrap = bootstrap
        self.settings = {"ladder": f"faults-{uuid4().hex[:8]}", "partitions": 2, **settings}
        self.admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self.broker = self.open()
        self.topology = self.broker.topology
        #: Errors that the dispatcher reported and continued from.
        self.failures: list[Exception] = []

    def open(self, **more: Any) -> KafkaBroker:
        """Return another client of the same ladder."""
        return KafkaBroker(self.config(**more))

    def config(self, **more: Any) -> KafkaConfig:
        return KafkaConfig.from_settings(self.settings | more, host=self.bootstrap)

    def __enter__(self) -> Self:
        self.broker.create_topology()
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.close()
        with self.open() as broker:
            delete_ladder(broker)

    @contextmanager
    def dispatching(self) -> Iterator[None]:
        """Run a dispatcher, which continues after an error like the real one."""
        stop = threading.Event()

        def dispatch() -> None:
            with self.open() as own:
                dispatcher = own.open_ladder_dispatcher()
                while not stop.is_set():
                    try:
                        dispatcher.run_once()
                    except Exception as error:  # noqa: BLE001 - looked at by the test
                        self.failures.append(error)
                        stop.wait(0.2)
                dispatcher.close()

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(dispatch)
            try:
                yield
            finally:
                stop.set()
            running.result(120)

    def wait_for_dispatcher(self) -> None:
        """Return once it is at work."""
        channel = self.channel()
        self.broker.schedule(self.messages(channel, 1, after=0.1))
        self.arrived(channel, 1)

    def defects(self) -> list[Exception]:
        """Reported errors, without transient ones of the broker, which a busy machine causes."""
        return [each for each in self.failures if not (isinstance(each, BrokerError) and each.may_pass)]

    def channel(self, partitions: int = 1, **config: Any) -> str:
        return fresh_topic(self.bootstrap, partitions, message_timestamp_type="LogAppendTime", **config)

    def delete_channel(self, channel: str) -> None:
        self.admin.delete_topics([channel])[channel].result(60)

    def change_settings(self, topic: str, **config: Any) -> None:
        entries = [
            ConfigEntry(name.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
            for name, value in config.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result(60)
        wanted = {name.replace("_", "."): str(value) for name, value in config.items()}

        def is_known() -> bool:
            asked = ConfigResource(ConfigResource.Type.TOPIC, topic)
            [answer] = self.admin.describe_configs([asked]).values()
            have = {name: entry.value for name, entry in answer.result(60).items()}
            return all(have[name] == value for name, value in wanted.items())

        wait_for(is_known, what=f"the settings of {topic} are known")

    def message(self, channel: str, *, after: float, **options: Any) -> Message:
        options.setdefault("payload", uuid4().bytes)
        return Message(channel=channel, deliver_at=datetime.now(UTC) + timedelta(seconds=after), **options)

    def messages(self, channel: str, count: int, *, after: float) -> list[Message]:
        return [self.message(channel, after=after) for _ in range(count)]

    def arrived(self, channel: str, count: int, *, seconds: float = 90) -> list[Record]:
        """Return all records of a channel, once there are so many; none may be early, none may be too many."""
        read_all(self.bootstrap, channel, count, seconds=seconds)
        records = list(read_to_end(self.bootstrap, [channel]))
        assert len(records) == count
        for record in records:
            assert record.timestamp()[1] >= int(headers_of(record)["delay-deliver-at"])
        return records

    def dead(self, ids: Iterable[str]) -> dict[str, Record]:
        """Return the records of these ids in the dead-letter topic, once all have arrived."""
        wanted = set(ids)

        def found() -> dict[str, Record] | None:
            records = {id_of(record): record for record in read_to_end(self.bootstrap, [self.topology.dead])}
            return records if wanted <= records.keys() else None

        # Of a deleted topic, a busy broker speaks the truth late, and each check costs a message another 10 s.
        return wait_for(found, what="messages among the dead", seconds=200)

    def history(self, message_id: str, *, since: str = FROM_THE_START, least: int = 0) -> list[JournalEntry]:
        """What the journal says of a message, once there is so much."""
        with self.open() as reader:
            return journal_of(reader, message_id, since=since, least=least)

    def ends(self, *topics: str) -> dict[tuple[str, int], int]:
        return self._offsets(topics, OffsetSpec.latest())

    def starts(self, *topics: str) -> dict[tuple[str, int], int]:
        return self._offsets(topics, OffsetSpec.earliest())

    def _offsets(self, topics: Iterable[str], which: Any) -> dict[tuple[str, int], int]:
        # Asked for all topics, the library looks up the current leader of each partition.
        known = self.admin.list_topics(timeout=60).topics
        question = {TopicPartition(topic, number): which for topic in topics for number in known[topic].partitions}
        answers = self.admin.list_offsets(question, request_timeout=60)
        return {(each.topic, each.partition): future.result().offset for each, future in answers.items()}


def journal_of(reader: KafkaBroker, message_id: str, *, since: str, least: int) -> list[JournalEntry]:
    """What a client reads of a message; where nothing comes, something may still be on its way."""
    entries, position = list[JournalEntry](), since

    def is_read() -> bool:
        nonlocal position
        while found := reader.read_journal(after=position):
            entries.extend(entry for entry in found if entry.message_id == message_id)
            position = found[-1].position
        return len(entries) >= least

    wait_for(is_read, what=f"the journal has {message_id}")
    return entries


def headers_of(record: Record) -> dict[str, str]:
    return {name: (value or b"").decode() for name, value in record.headers() or []}


def id_of(record: Record) -> str:
    return headers_of(record).get("delay-id", "")


def ids_of(things: Iterable[Message | Record]) -> list[str]:
    return sorted(each.id if isinstance(each, Message) else id_of(each) for each in things)


@pytest.fixture(scope="module")
def served() -> Iterator[Scene]:
    """A ladder that a dispatcher always serves."""
    with Scene(require_kafka()) as opened, opened.dispatching():
        yield opened


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene(require_kafka()) as opened:
        yield opened


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker to be killed, which forgets the progress of a group as soon as Kafka can."""
    forgetful = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"}
    with private_broker(tmp_path_factory.mktemp("kafka"), forgetful) as broker:
        yield broker


@pytest.fixture(scope="module")
def quiet(own: Kafka) -> Iterator[tuple[Scene, str]]:
    """A ladder and a channel through which messages have passed, and a group that has had no member since then."""
    with Scene(own.bootstrap) as scene, scene.dispatching():
        channel = scene.channel()
        # Once the dispatcher is at work, all of them rest in a rung.
        scene.wait_for_dispatcher()
        scene.broker.schedule(scene.messages(channel, 20, after=10))
        scene.arrived(channel, 20)
        with Consumer({"bootstrap.servers": own.bootstrap, "group.id": idle_group_of(scene)}) as idle:
            idle.commit(offsets=[TopicPartition(channel, 0, 0)], asynchronous=False)
        yield scene, channel


def idle_group_of(scene: Scene) -> str:
    return f"idle.{scene.settings['ladder']}"


# -- brokers that stop ---------------------------------------------------------------------------------------------


def test_an_unreachable_broker_names_all_messages_as_unconfirmed_in_bounded_time() -> None:
    nowhere = f"127.0.0.1:{process.free_port()}"
    scene = Scene(nowhere, confirm_timeout=2)
    messages = scene.messages("orders", 3, after=60)
    started = time.monotonic()
    with scene.broker, pytest.raises(BrokerError, match=r"cannot be reached .*Connection refused") as refused:
        scene.broker.schedule(messages)
    assert time.monotonic() - started < 20
    assert refused.value.may_pass
    assert refused.value.unconfirmed == tuple(message.id for message in messages)


class HaltingBroker(KafkaBroker):
    """Stops at one message of a batch until it may continue."""

    def __init__(self, config: KafkaConfig, *, at: Message) -> None:
        super().__init__(config)
        self.has_come, self.may_go_on = threading.Event(), threading.Event()
        encode = self._publisher.waiting

        def halting(message: Message, *arguments: Any, **options: Any) -> Any:
            if message is at:
                self.has_come.set()
                self.may_go_on.wait()
            return encode(message, *arguments, **options)

        self._publisher.waiting = halting  # type: ignore[method-assign]


def test_a_broker_killed_in_mid_batch_leaves_no_message_unnamed(own: Kafka, quiet: tuple[Scene, str]) -> None:
    """D11, E1"""
    with Scene(own.bootstrap) as scene:
        channel = scene.channel()
        messages = scene.messages(channel, 60_000, after=20)
        scene.broker.schedule(messages[:1])
        with (
            HaltingBroker(scene.config(confirm_timeout=2), at=messages[30_000]) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            scheduling = pool.submit(client.schedule, messages[1:])
            try:
                wait_for(client.has_come.is_set, what="half of them are on their way")
                wait_for(lambda: sum(scene.ends(scene.topology.inbox).values()) > 1, what="some are written")
                own.kill()
            finally:
                client.may_go_on.set()
            started = time.monotonic()
            with pytest.raises(BrokerError) as lost:
                scheduling.result()
        assert time.monotonic() - started < 20
        unconfirmed = set(lost.value.unconfirmed)
        assert unconfirmed
        assert unconfirmed <= {message.id for message in messages[1:]}
        own.start_again()
        scene.broker.schedule([message for message in messages if message.id in unconfirmed])
        with scene.dispatching():
            arrived: Counter[str] = Counter()

            def all_arrived() -> bool:
                arrived.clear()
                arrived.update(id_of(record) for record in read_to_end(own.bootstrap, [channel]))
                return len(arrived) >= len(messages)

            wait_for(all_arrived, what="every id arrives", seconds=150, interval=1)
        assert set(arrived) == {message.id for message in messages}
        assert {name for name, count in arrived.items() if count > 1} <= unconfirmed


def test_a_client_goes_on_after_the_broker_was_started_again(own: Kafka, quiet: tuple[Scene, str]) -> None:
    """D12: the library believes for long what it once knew of leaders."""
    scene = quiet[0]
    channel = scene.channel()
    with scene.open() as client:
        client.schedule(scene.messages(channel, 1, after=0))
        assert len(client.receive(channel)) == 1
        position = client.journal_end()
        own.kill()
        own.start_again()
        message = scene.message(channel, after=1)
        client.schedule([message])
        wait_for(lambda: client.find_outcomes([message.id], since=position), what="the outcome")
        client.schedule([kept := scene.message(channel, after=3600)])
        wait_for(lambda: scene.history(kept.id, since=position), what="the message waits")
        client.cancel([kept.id])
        assert wait_for(lambda: client.receive(channel, limit=10), what="the message")[-1].message.id == message.id


# -- channels ------------------------------------------------------------------------------------------------------


def test_a_topic_that_does_not_exist_is_refused_and_nothing_is_written(scene: Scene) -> None:
    channel, inbox = scene.channel(), scene.topology.inbox
    before = scene.ends(inbox, channel)
    messages = [scene.message(channel, after=60), scene.message(f"nowhere-{uuid4().hex}", after=60)]
    with pytest.raises(UnknownChannelError, match=r"has no topic 'nowhere-.*; create it, or correct the name"):
        scene.broker.schedule(messages)
    with pytest.raises(UnknownChannelError, match="has no topic 'nowhere-"):
        scene.broker.receive(messages[1].channel)
    assert scene.ends(inbox, channel) == before


def test_messages_whose_topic_was_deleted_are_dead_lettered_and_block_no_others(served: Scene) -> None:
    """E11"""
    gone, kept = served.channel(), served.channel()
    # The dispatcher has just written to it, so it is believed to be there.
    served.broker.schedule([served.message(gone, after=0.1)])
    served.arrived(gone, 1)
    served.delete_channel(gone)
    # The client believes so too, for a while.
    orphans = [served.message(gone, after=1 + 0.01 * n, headers={"n": str(n)}, key="k") for n in range(20)]
    others = [served.message(kept, after=1 + 0.01 * n) for n in range(20)]
    served.broker.schedule([message for pair in zip(orphans, others, strict=True) for message in pair])
    assert ids_of(served.arrived(kept, 20)) == ids_of(others)
    dead = served.dead(message.id for message in orphans)
    for message in orphans:
        record = dead[message.id]
        assert record.value() == message.payload
        assert record.key() == b"k"
        received = headers_of(record)
        assert (received["n"], received["delay-channel"], received["delay-change"]) == (
            message.headers["n"],
            gone,
            "dead_lettered",
        )
        assert "Unknown topic or partition" in received["delay-reason"]
    [scheduled, dead_lettered] = served.history(orphans[0].id, least=2)
    assert (scheduled.change, dead_lettered.change) == (Change.SCHEDULED, Change.DEAD_LETTERED)
    assert dead_lettered.reason is not None
    assert "Unknown topic or partition" in dead_lettered.reason


def test_a_payload_that_the_topic_does_not_take_is_refused_before_it_waits(scene: Scene) -> None:
    small = scene.channel(max_message_bytes=20_000)
    before = scene.ends(scene.topology.inbox)
    messages = [scene.message(small, after=60), scene.message(small, after=60, payload=bytes(20_000))]
    with pytest.raises(PayloadError, match=r"does not fit into topic .*raise max.message.bytes"):
        scene.broker.schedule(messages)
    assert scene.ends(scene.topology.inbox) == before


def test_a_message_that_has_become_too_large_is_dead_lettered_and_its_neighbours_arrive_once(served: Scene) -> None:
    """E11, E12: readers of committed records never see aborted writes."""
    channel, other = served.channel(), served.channel()
    # The client believes for a while what it has heard of the channel here.
    served.broker.check_channels([channel])
    served.change_settings(channel, max_message_bytes=10_000)
    large = [served.message(channel, after=1 + 0.1 * n, payload=bytes(50_000)) for n in range(2)]
    small = [served.message(channel, after=0.9 + 0.05 * n) for n in range(10)]
    others = [served.message(other, after=0.9 + 0.05 * n) for n in range(10)]
    served.broker.schedule([*large, *small, *others])
    dead = served.dead(message.id for message in large)
    assert all("too large" in headers_of(dead[message.id])["delay-reason"] for message in large)
    assert ids_of(served.arrived(channel, 10)) == ids_of(small)
    assert ids_of(served.arrived(other, 10)) == ids_of(others)
    assert [entry.change for entry in served.history(large[0].id, least=2)] == [Change.SCHEDULED, Change.DEAD_LETTERED]


def test_a_topic_that_forgets_soon_is_refused(scene: Scene) -> None:
    """D18, E12"""
    hasty = scene.channel(retention_ms=10_000)
    with pytest.raises(ConfigurationError, match=r"deletes messages after 10000 ms.*set its retention\.ms to 60000"):
        scene.broker.schedule([scene.message(hasty, after=60)])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("retention_ms", 3_600_000),
        ("retention_bytes", 1_000_000),
        ("cleanup_policy", "compact"),
        ("message_timestamp_type", "CreateTime"),
        ("max_message_bytes", 1_000_000),
    ],
)
def test_a_rung_that_could_lose_messages_is_refused(scene: Scene, setting: str, value: Any) -> None:
    """D18, E12"""
    rung, channel = scene.topology.rung(8_000), scene.channel()
    scene.change_settings(rung, **{setting: value})
    name = setting.replace("_", ".")
    sentence = rf"topic {rung} has {name}={value} and needs .*, or waiting messages could be lost or stuck"
    with scene.open() as broker:
        with pytest.raises(ConfigurationError, match=sentence):
            broker.schedule([scene.message(channel, after=60)])
        with pytest.raises(ConfigurationError, match=sentence):
            broker.open_ladder_dispatcher().run_once()
        assert [issue.is_problem for issue in broker.verify_topology() if name in issue.text] == [True]


def test_another_number_of_partitions_than_the_ladder_has_is_refused(scene: Scene) -> None:
    channel = scene.channel()
    with (
        scene.open(partitions=3) as other,
        pytest.raises(ConfigurationError, match=r"has 2 partitions and the connection says 3; .* set partitions to 2"),
    ):
        other.schedule([scene.message(channel, after=60)])


def test_outcomes_since_many_positions_are_found_in_one_look_back(
    served: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: each id counts from its own position on, as Kafka lets an id be used again."""
    channel = served.channel()
    begin = served.broker.journal_end()
    first, second = served.messages(channel, 2, after=0.1)
    served.broker.schedule([first])
    served.arrived(channel, 1)
    after = served.broker.journal_end()
    served.broker.schedule([second])
    served.arrived(channel, 2)
    looks: list[Any] = []
    scan = JournalReader._scan

    def counted(self: JournalReader, start: Any, bounds: Any) -> Any:
        looks.append(start)
        return scan(self, start, bounds)

    monkeypatch.setattr(JournalReader, "_scan", counted)
    with served.open() as another:
        found = another.find_outcomes_of_each({first.id: after, second.id: begin, "unknown": begin})
        assert list(found) == [second.id]
        assert len(looks) == 1
        assert another.find_outcomes_of_each({first.id: begin, second.id: after}).keys() == {first.id, second.id}


# -- records of strangers ------------------------------------------------------------------------------------------


def in_ms(seconds: float) -> int:
    return ceil_ms(datetime.now(UTC) + timedelta(seconds=seconds))


@pytest.mark.parametrize("with_id", [True, False])
@pytest.mark.parametrize("when", ["milliseconds", "iso", "after"])
def test_any_kafka_producer_can_schedule(served: Scene, when: str, with_id: bool) -> None:
    """E1, E9"""
    channel, name = served.channel(), f"plain-{uuid4().hex}"
    due_ms = in_ms(2.5)
    iso = datetime.fromtimestamp(due_ms / 1000, UTC).isoformat()
    headers = {"delay-channel": channel.encode(), "colour": b"green"} | {
        "milliseconds": {"delay-deliver-at": b"%d" % due_ms},
        "iso": {"delay-deliver-at": iso.encode()},
        "after": {"delay-deliver-after-ms": b"2500"},
    }[when]
    if with_id:
        headers["delay-id"] = name.encode()
    [written] = produce(served.bootstrap, served.topology.inbox, [b"hello"], key=b"customer-1", headers=headers)
    [record] = served.arrived(channel, 1)
    assert (record.key(), record.value()) == (b"customer-1", b"hello")
    received = headers_of(record)
    assert received["colour"] == "green"
    assert id_of(record) == (name if with_id else f"{served.topology.inbox}-{written.partition()}-{written.offset()}")
    if when == "after":
        # The broker's clock says when it was written.
        [written] = [each for each in served.history(id_of(record), least=2) if each.change is Change.SCHEDULED]
        assert int(received["delay-deliver-at"]) == ceil_ms(written.at) + 2500
    else:
        assert int(received["delay-deliver-at"]) == due_ms


def kcat() -> str:
    """The program, installed where that is possible."""
    if shutil.which("kcat") is None and not process.apt_install("kcat"):
        do_without("kcat is not installed and apt-get cannot install it: nothing is known of what it schedules")
    return shutil.which("kcat") or ""


def test_a_shell_can_schedule_with_kcat(served: Scene) -> None:
    """E1, E9"""
    program, channel, name = kcat(), served.channel(), f"kcat-{uuid4().hex}"
    headers = {"delay-channel": channel, "delay-deliver-after-ms": "1000", "delay-id": name}
    options = [option for header in headers.items() for option in ("-H", "=".join(header))]
    command = [program, "-P", "-b", served.bootstrap, "-t", served.topology.inbox, *options]
    subprocess.run(command, input=b"hello", timeout=90, check=True)
    [record] = served.arrived(channel, 1)
    assert (id_of(record), record.value()) == (name, b"hello")


def test_invalid_records_are_dead_lettered_and_stop_no_others(served: Scene) -> None:
    """E11"""
    channel, inbox = served.channel(), served.topology.inbox
    at, to = {"delay-deliver-at": b"%d" % in_ms(1)}, {"delay-channel": channel.encode()}
    bad: dict[str, dict[str, bytes]] = {
        "delay-channel: is missing": at,
        "delay-deliver-at: is missing": to,
        "delay-deliver-after-ms is given too": at | to | {"delay-deliver-after-ms": b"1"},
        "'soon' is not a time": to | {"delay-deliver-after-ms": b"soon"},
        "cannot be a Kafka topic": at | {"delay-channel": b"no such/topic"},
        "'tomorrow' is not a time": to | {"delay-deliver-at": b"tomorrow"},
        "Unknown topic or partition": at | {"delay-channel": b"nowhere-" + uuid4().hex.encode()},
    }
    names = {reason: f"bad-{uuid4().hex}" for reason in bad}
    for reason, headers in bad.items():
        produce(served.bootstrap, inbox, [b"x"], headers=headers | {"delay-id": names[reason].encode()})
    produce(served.bootstrap, inbox, [b"no headers, no envelope", b"", None], key=b"k")
    produce(served.bootstrap, inbox, [b"\x01" + bytes(100)], key=bytes(20))
    produce(served.bootstrap, inbox, [b"no key"])
    produce(served.bootstrap, served.topology.control, [b"no command", b"", None], key=b"k")
    message = served.message(channel, after=1.5)
    served.broker.schedule([message])
    dead = served.dead(names.values())
    for reason, name in names.items():
        assert reason in headers_of(dead[name])["delay-reason"]
        assert dead[name].value() == b"x"
    assert ids_of(served.arrived(channel, 1)) == [message.id]


def test_a_record_that_is_small_only_while_it_is_compressed_stops_no_others(scene: Scene) -> None:
    """E11: the ladder's topics count compressed bytes, and what is written on is not compressed."""
    channel = scene.channel(max_message_bytes=40_000_000)
    headers = {"delay-channel": channel.encode(), "delay-deliver-after-ms": b"2500", "delay-id": b"blown-up"}
    settings = {"compression.type": "gzip", "message.max.bytes": 40_000_000}
    for partition in range(2):
        produce(
            scene.bootstrap,
            scene.topology.inbox,
            [bytes(20_000_000)],
            headers=headers,
            partition=partition,
            settings=settings,
        )
    others = scene.messages(channel, 10, after=3)
    scene.broker.schedule(others)
    with scene.dispatching():
        wait_for(
            lambda: set(ids_of(others)) <= {id_of(each) for each in read_to_end(scene.bootstrap, [channel])},
            what="the others arrive",
        )
    assert scene.defects() == []


def test_records_of_a_transaction_that_was_aborted_were_never_scheduled(served: Scene) -> None:
    """E12"""
    channel = served.channel()
    settings = {"bootstrap.servers": served.bootstrap, "transactional.id": channel, "log_level": 0}
    headers = {"delay-channel": channel, "delay-deliver-after-ms": "500"}
    with Producer(settings) as producer:
        producer.init_transactions(30)
        for name, end in (("aborted", producer.abort_transaction), ("committed", producer.commit_transaction)):
            producer.begin_transaction()
            producer.produce(served.topology.inbox, b"x", headers=headers | {"delay-id": f"{name}-{channel}"})
            producer.flush(30)
            end(30)
    assert [id_of(record) for record in served.arrived(channel, 1)] == [f"committed-{channel}"]
    assert served.history(f"aborted-{channel}") == []


# -- dispatchers ---------------------------------------------------------------------------------------------------


def test_the_broker_refuses_offsets_of_a_member_that_lost_its_partitions(scene: Scene) -> None:
    """B32: but it takes that of a client that is no member at all, so a membership must never be asked for later."""
    topic, group = scene.channel(), f"group-{uuid4().hex}"

    def member() -> Consumer:
        assigned: list[TopicPartition] = []
        consumer = Consumer(
            {"bootstrap.servers": scene.bootstrap, "group.id": group, "enable.auto.commit": False, "log_level": 0}
        )
        consumer.subscribe([topic], on_assign=lambda _, partitions: assigned.extend(partitions))
        wait_for(lambda: consumer.poll(0.05) or assigned, what="a member")
        return consumer

    def commit_as(membership: Any) -> str:
        settings = {"bootstrap.servers": scene.bootstrap, "transactional.id": uuid4().hex, "log_level": 0}
        with Producer(settings) as producer:
            producer.init_transactions(30)
            producer.begin_transaction()
            try:
                producer.send_offsets_to_transaction([TopicPartition(topic, 0, 1)], membership, 30)
            except KafkaException as error:
                producer.abort_transaction(30)
                return str(error.args[0].name())
            producer.commit_transaction(30)
        return "accepted"

    with member() as first:
        old = first.consumer_group_metadata()
        assert commit_as(old) == "accepted"
    with member():
        assert commit_as(old) == "UNKNOWN_MEMBER_ID"
        with Consumer({"bootstrap.servers": scene.bootstrap, "group.id": group}) as stranger:
            assert commit_as(stranger.consumer_group_metadata()) == "accepted"


def test_records_that_messages_have_left_are_removed(scene: Scene) -> None:
    """D18: the ladder keeps waiting messages, and no more."""
    channel = scene.channel()
    with scene.dispatching():
        scene.wait_for_dispatcher()
        passing, waiting = scene.messages(channel, 200, after=8), scene.messages(channel, 1, after=3600)
        scene.broker.schedule([*passing, *waiting])
        scene.arrived(channel, 200)
    inbox, rungs = scene.topology.inbox, [scene.topology.rung(hold_ms) for hold_ms in SHORT_HOLDS_MS]
    wait_for(lambda: scene.starts(inbox) == scene.ends(inbox), what="what was done is removed")
    assert sum(scene.starts(*rungs).values()) > 150
    assert scene.defects() == []
    with scene.dispatching():
        scene.broker.cancel([waiting[0].id])


def test_a_dispatcher_is_ready_in_seconds_however_many_messages_wait(scene: Scene, tmp_path: Path) -> None:
    """D6, D7, E2: only messages that are due soon are in memory."""
    channel, count = scene.channel(), 20_000
    for _ in range(4):
        scene.broker.schedule(scene.messages(channel, count // 4, after=7 * 86_400))
    given = {"bootstrap": scene.bootstrap, "settings": scene.settings}
    first = Dispatcher(given, tmp_path)
    rungs = [scene.topology.rung(hold) for hold in scene.topology.ladder.holds_ms]
    try:
        wait_for(lambda: sum(scene.ends(*rungs).values()) >= count, what="all wait in rungs", seconds=120, interval=0.5)
        assert first.stop()
        before = scene.ends(*rungs)
        again = Dispatcher(given, tmp_path)
        try:
            wait_for(lambda: again.partitions() == (0, 1), what="it serves")
            assert again.cpu_seconds() < 10, "a quiet machine needs two"
            message = scene.message(channel, after=1)
            scene.broker.schedule([message])
            assert ids_of(scene.arrived(channel, 1)) == [message.id]
            assert scene.ends(*rungs) == before, "nothing was written again"
            assert again.rss_mb() < 150
        finally:
            again.kill()
    finally:
        if first.is_running():
            first.kill()
    wait_for(lambda: not members_of(scene), what="it is missed")


def members_of(scene: Scene) -> int:
    group = scene.topology.dispatch_group
    return len(scene.admin.describe_consumer_groups([group])[group].result(60).members)


# -- consumers -----------------------------------------------------------------------------------------------------


class Taker:
    """A consumer in a thread of its own."""

    def __init__(self, scene: Scene, channel: str) -> None:
        self.taken: list[str] = []
        self.looks = 0
        self._scene = scene
        self._channel = channel
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)

    def _run(self) -> None:
        with self._scene.open() as broker:
            while not self._stop.is_set():
                # A group that has just lost a member may take its time. What is handed to another meanwhile, that one
                # settles.
                with suppress(BrokerError, LifecycleError):
                    deliveries = broker.receive(self._channel, limit=10)
                    broker.ack(deliveries)
                    self.taken += [delivery.message.id for delivery in deliveries]
                self.looks += 1


def test_consumers_share_the_partitions_of_a_topic_and_get_each_message_once(scene: Scene) -> None:
    """B32"""
    channel = scene.channel(partitions=4)
    group = f"airflow-delay.{channel}"
    with Taker(scene, channel) as one, Taker(scene, channel) as two:

        def have_shared() -> bool:
            members = scene.admin.describe_consumer_groups([group])[group].result(60).members
            return [len(member.assignment.topic_partitions) for member in members] == [2, 2]

        wait_for(have_shared, what="they share the partitions", interval=0.2)
        looks = one.looks, two.looks
        wait_for(lambda: one.looks > looks[0] + 1 and two.looks > looks[1] + 1, what="both look")
        # Without keys, a quick client may put all of them into one partition.
        messages = [scene.message(channel, after=0, key=f"key {number}") for number in range(400)]
        scene.broker.send(messages)
        wait_for(lambda: len(one.taken) + len(two.taken) >= 400, what="all are taken")
    assert sorted([*one.taken, *two.taken]) == ids_of(messages)
    assert one.taken
    assert two.taken


CRASHING = """
import json, os, signal, sys
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
bootstrap, settings, channel = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
broker = KafkaBroker(KafkaConfig.from_settings(settings, host=bootstrap))
deliveries = broker.receive(channel, limit=10)
broker.ack(deliveries[5:])
assert len(deliveries) == 10
broker.receive(channel)  # what is settled is committed now at the latest
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_messages_of_a_killed_consumer_go_to_another_unless_they_were_acknowledged(scene: Scene) -> None:
    """B32"""
    channel = scene.channel()
    messages = scene.messages(channel, 12, after=0)
    scene.broker.send(messages)
    arguments = [scene.bootstrap, json.dumps(scene.settings), channel]
    assert subprocess.run([sys.executable, "-c", CRASHING, *arguments], timeout=120).returncode == -signal.SIGKILL
    with Taker(scene, channel) as other:
        wait_for(lambda: len(other.taken) >= 7, what="the rest")
    in_order = [id_of(record) for record in read_to_end(scene.bootstrap, [channel])]
    assert other.taken == [*in_order[:5], *in_order[10:]]


# -- last, because it takes a minute from the first test of the broker on ---------------------------------------------


def test_a_quiet_rung_keeps_its_progress_while_a_dispatcher_runs(quiet: tuple[Scene, str]) -> None:
    """D12, D18"""
    scene, passed = quiet
    rungs = [scene.topology.rung(hold_ms) for hold_ms in SHORT_HOLDS_MS]
    places = [TopicPartition(rung, partition) for rung in rungs for partition in range(2)]
    settings = {"bootstrap.servers": scene.bootstrap, "group.id": scene.topology.dispatch_group}
    with Consumer(settings) as reader:
        before = [each.offset for each in reader.committed(places, 60)]
        assert sum(max(offset, 0) for offset in before) >= 20
        # Kafka forgets the offsets of a group without members after a minute.
        with Consumer(settings | {"group.id": idle_group_of(scene)}) as idle:

            def is_forgotten() -> bool:
                return bool(idle.committed([TopicPartition(passed, 0)], 60)[0].offset < 0)

            wait_for(is_forgotten, what="the idle group is forgotten", seconds=150, interval=1)
        assert [each.offset for each in reader.committed(places, 60)] == before
    channel = scene.channel()
    messages = scene.messages(channel, 20, after=3)
    scene.broker.schedule(messages)
    assert ids_of(scene.arrived(channel, 20)) == ids_of(messages)
