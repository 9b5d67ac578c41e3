"""A ladder served by the job on Spark: what consumers see, control, hostile records, and who may serve it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_delay_provider.brokers.kafka import verify
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.reader import Reader, log_starts, stable_ends
from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, LifecycleError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.streaming import membership
from tests.integration.pipeline.streaming_dispatcher import StreamedLadder, ids_of, serve_until_refused, streamed_ladder
from tests.kafkas import delete_ladder, dispatching, fresh_topic, produce, require_kafka
from tools.servers.component import wait_for
from tools.servers.spark import client_environment

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ladder(kafka_connector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamedLadder]:
    """A ladder that the job serves."""
    folder = Path(tmp_path_factory.mktemp("streamed"))
    with streamed_ladder(require_kafka(), kafka_connector, folder) as ladder:
        ladder.start()
        yield ladder


def messages_for(ladder: StreamedLadder, channel: str, n: int, *, seconds: float, **given: Any) -> list[Message]:
    with ladder.open() as broker:
        now = broker.clock.now()
        return [
            Message(
                id=uuid4().hex,
                channel=channel,
                payload=b"payload %d" % number,
                deliver_at=now + timedelta(seconds=1 + seconds * number / n),
                **given,
            )
            for number in range(n)
        ]


def schedule(ladder: StreamedLadder, messages: list[Message]) -> None:
    with ladder.open() as broker:
        broker.schedule(messages)


def early(records: list[KafkaMessage]) -> list[str]:
    """The ids of records that were written before they were due."""
    headers = [(record.timestamp()[1], dict(record.headers())) for record in records]
    return [each["delay-id"].decode() for at_ms, each in headers if at_ms < int(each["delay-deliver-at"])]


def outcome_of(ladder: StreamedLadder, message: Message) -> Change | None:
    with ladder.open() as broker:
        found = broker.find_outcomes([message.id], since="")
        return found[message.id].change if message.id in found else None


def test_consumers_see_what_the_plain_dispatcher_writes(ladder: StreamedLadder):
    """M10"""
    plain, streamed = fresh_topic(ladder.bootstrap), fresh_topic(ladder.bootstrap)
    given = {"key": "k", "headers": {"colour": "grün"}, "content_type": "text/plain", "priority": 3}
    other = StreamedLadder(ladder.bootstrap, "", ladder.folder)
    ours, theirs = (messages_for(ladder, each, 1, seconds=0, **given) for each in (streamed, plain))
    with other.open() as broker:
        broker.create_topology()
        with other.open() as own, dispatching(own):
            broker.schedule(theirs)
            (expected,) = ladder.received(plain, 1)
        delete_ladder(broker)
    schedule(ladder, ours)
    (found,) = ladder.received(streamed, 1)
    varies = {"delay-id", "delay-deliver-at", "delay-scheduled-at"}

    def comparable(record: KafkaMessage) -> tuple[Any, ...]:
        fixed = [header for header in record.headers() if header[0] not in varies]
        return record.key(), record.value(), fixed, [name for name, _ in record.headers()]

    assert comparable(found) == comparable(expected)
    assert early([found]) == []


def test_messages_of_one_key_arrive_in_the_order_of_their_due_times_and_never_early(ladder: StreamedLadder):
    channel = fresh_topic(ladder.bootstrap)
    messages = messages_for(ladder, channel, 300, seconds=8, key="one")
    schedule(ladder, list(reversed(messages)))
    records = ladder.received(channel, 300)
    assert ids_of(records) == [message.id for message in messages]
    assert early(records) == []
    wait_for(lambda: outcome_of(ladder, messages[-1]) is Change.DISPATCHED, what="the journal has the last", seconds=60)


def test_waiting_messages_are_cancelled_rescheduled_and_expedited(ladder: StreamedLadder):
    channel = fresh_topic(ladder.bootstrap)
    cancelled, moved, sooner = messages_for(ladder, channel, 3, seconds=0)
    far = timedelta(hours=1)
    with ladder.open() as broker:
        now = broker.clock.now()
        broker.schedule(
            [
                Message(id=each.id, channel=channel, payload=b"", deliver_at=now + far)
                for each in (cancelled, moved, sooner)
            ]
        )
        broker.cancel([cancelled.id])
        broker.reschedule([moved.id], now + 2 * far)
        broker.reschedule([moved.id], broker.clock.now() + timedelta(seconds=2))
        broker.expedite([sooner.id])
        records = ladder.received(channel, 2)
        assert sorted(ids_of(records)) == sorted([moved.id, sooner.id])
        assert early(records) == []
        wait_for(lambda: outcome_of(ladder, moved) is Change.DISPATCHED, what="the journal has it", seconds=60)
        assert outcome_of(ladder, cancelled) is Change.CANCELLED
        with pytest.raises(LifecycleError, match="is DISPATCHED since"):
            broker.cancel([moved.id])


def test_a_bad_channel_delays_no_other(ladder: StreamedLadder):
    gone, good = fresh_topic(ladder.bootstrap), fresh_topic(ladder.bootstrap)
    narrow = fresh_topic(ladder.bootstrap, max_message_bytes=2000)
    lost = messages_for(ladder, gone, 20, seconds=1)
    small = messages_for(ladder, narrow, 40, seconds=1)
    fine = messages_for(ladder, good, 40, seconds=1)
    schedule(ladder, [*lost, *small, *fine])
    with AdminClient({"bootstrap.servers": ladder.bootstrap}) as admin:
        admin.delete_topics([gone])[gone].result(60)
    assert sorted(ids_of(ladder.received(good, 40))) == sorted(each.id for each in fine)
    assert sorted(ids_of(ladder.received(narrow, 40))) == sorted(each.id for each in small)
    wait_for(lambda: outcome_of(ladder, lost[-1]) is Change.DEAD_LETTERED, what="the journal says so", seconds=60)
    with ladder.open() as broker:
        dead = [each for each in ladder.received(broker.topology.dead, 20) if dict(each.headers()).get("delay-channel")]
    assert {each.id for each in lost} <= set(ids_of(dead))


def test_hostile_records_become_dead_letters_and_any_program_can_schedule(ladder: StreamedLadder):
    channel = fresh_topic(ladder.bootstrap)
    with ladder.open() as broker:
        topology = broker.topology
    known = {"delay-channel": channel.encode(), "delay-deliver-after-ms": b"1000"}
    produce(ladder.bootstrap, topology.inbox, [b"no headers", None])
    produce(ladder.bootstrap, topology.inbox, [b"no time"], headers={"delay-channel": channel.encode()})
    produce(ladder.bootstrap, topology.inbox, [b"\xff" * 100], key=b"12345678id")
    produce(ladder.bootstrap, topology.control, [b"no command"])
    produce(ladder.bootstrap, topology.rung(2000), [b"no envelope"], key=b"123456789")
    produce(ladder.bootstrap, topology.inbox, [b"good"], headers={**known, "mine": b"\xff"}, key=b"key")
    (record,) = ladder.received(channel, 1)
    assert (record.key(), record.value(), early([record])) == (b"key", b"good", [])

    wait_for(lambda: len(_hostile(ladder)) >= 6, what="six dead letters", seconds=120)
    assert all(dict(each.headers())["delay-reason"] for each in _hostile(ladder))


def _hostile(ladder: StreamedLadder) -> list[KafkaMessage]:
    """Dead letters that were no messages."""
    with closing(KafkaClients(ladder.config)) as clients, closing(Reader(clients)) as reader:
        dead = [TopicPartition(ladder.config.topology.dead, number) for number in range(ladder.partitions)]
        records = list(reader.read_between(log_starts(clients, dead), stable_ends(clients, dead)))
    return [each for each in records if "delay-id" not in dict(each.headers())]


def test_a_plain_dispatcher_and_a_second_job_are_refused_with_one_sentence(
    ladder: StreamedLadder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(membership, "JOIN_SECONDS", 1)
    with ladder.open() as broker:
        with pytest.raises(BrokerError, match="dispatchers of another kind"):
            serve_until_refused(broker)
        clients = KafkaClients(broker.config)
        second = membership.Membership(clients, verify.complete(clients))
        with pytest.raises(ConfigurationError, match="a job on Spark already serves the ladder"):
            second.join()
        clients.close()


def test_a_ladder_with_a_plain_dispatcher_is_refused(
    kafka_connector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(membership, "JOIN_SECONDS", 1)
    with (
        streamed_ladder(require_kafka(), kafka_connector, tmp_path) as other,
        other.open() as own,
        dispatching(own),
        closing(KafkaClients(other.config)) as clients,
    ):
        others = clients.admin().describe_consumer_groups
        group = other.config.topology.dispatch_group
        wait_for(lambda: others([group])[group].result().members, what="the dispatcher serves", seconds=60)
        with pytest.raises(ConfigurationError, match="dispatcher already serves the ladder"):
            membership.Membership(clients, verify.complete(clients)).join()


def test_without_the_connector_the_job_names_the_package(tmp_path: Path):
    connection = json.dumps({"conn_type": "delay_kafka", "host": "127.0.0.1:1"})
    arguments = ["--connection", "ladder", "--checkpoint", str(tmp_path / "checkpoint")]
    ended = subprocess.run(
        [sys.executable, "-m", "airflow_delay_provider.spark.jobs.dispatch", *arguments],
        env={**os.environ, **client_environment(), "AIRFLOW_CONN_LADDER": connection},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 2
    assert "dispatch: error: --packages: Spark's Kafka connector is missing; add --packages org.apache" in ended.stderr
    assert "Traceback" not in ended.stderr
