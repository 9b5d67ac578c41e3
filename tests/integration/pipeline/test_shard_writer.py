"""Two writers of one shard, as Spark makes them when it repeats a task that still runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import AVAILABLE
from airflow_delay_provider.domain.clock import ceil_ms
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.streaming.channel_facts import ChannelFacts
from airflow_delay_provider.spark.streaming.frames import Frame, Kind
from airflow_delay_provider.spark.streaming.sink import ShardWriter
from airflow_delay_provider.spark.streaming.transaction import RecordsRefusedError, ShardTransaction
from tests.integration.pipeline.streaming_dispatcher import ids_of
from tests.kafkas import delete_ladder, fresh_topic, read_all, require_kafka

pytestmark = pytest.mark.timeout(300)
BATCH = 7


@pytest.fixture
def config() -> Iterator[KafkaConfig]:
    """A ladder of this test only."""
    settings = {"ladder": f"shard-{uuid4().hex[:8]}", "partitions": 1, "confirm_timeout": 60}
    config = KafkaConfig.from_settings(settings, host=require_kafka())
    with KafkaBroker(config) as broker:
        broker.create_topology()
        yield config
        delete_ladder(broker)


def delivery(number: int, channel: str, message_id: str, payload: bytes = b"p") -> Frame:
    """A due message, as the state hands it to the sink."""
    due = datetime(2026, 1, 1, tzinfo=UTC)
    message = Message(id=message_id, channel=channel, payload=payload, deliver_at=due)
    key = wire.encode_key(ceil_ms(due), message.id)
    return Frame(Kind.DELIVER, "inbox", 0, number, ceil_ms(due), key, wire.encode_envelope(message, now_ms=1))


def test_a_writer_that_was_fenced_while_a_message_was_refused_writes_nothing_that_the_other_has_written(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap, channel = require_kafka(), fresh_topic(require_kafka())
    narrow = fresh_topic(bootstrap, max_message_bytes=1000)
    frames = [delivery(number, channel, f"m{number}") for number in range(20)]
    frames.append(delivery(20, narrow, "large", b"x" * 5000))
    fill = ShardTransaction.fill
    with closing(ShardWriter(config, "service", 0)) as first, closing(ShardWriter(config, "service", 0)) as second:
        in_second = False

        def fill_and_let_the_second_commit(self: ShardTransaction, *given: object) -> None:
            nonlocal in_second
            try:
                fill(self, *given)  # type: ignore[arg-type]
            except RecordsRefusedError:
                if not in_second:
                    in_second = True
                    second.write(frames, BATCH)
                raise

        # The broker's description of a channel would tell in time: only the broker itself is to refuse.
        monkeypatch.setattr(ChannelFacts, "check", lambda *_: AVAILABLE)
        monkeypatch.setattr(ChannelFacts, "max_bytes_of", lambda *_: None)
        monkeypatch.setattr(ShardTransaction, "fill", fill_and_let_the_second_commit)
        written = first.write(frames, BATCH)
        assert in_second, "a message was refused"
        assert (written.delivered, written.dead) == (0, 0)
        # A later record shows that there is nothing behind the others.
        first.write([delivery(0, channel, "last")], BATCH + 1)
    ids = ids_of(read_all(bootstrap, channel, 21))
    assert ids == [*(f"m{number}" for number in range(20)), "last"]
    dead = read_all(bootstrap, config.topology.dead, 1)
    assert ids_of(dead) == ["large"]


def test_two_writers_that_live_at_once_both_come_to_an_end(config: KafkaConfig) -> None:
    bootstrap, channel = require_kafka(), fresh_topic(require_kafka())
    frames = [delivery(number, channel, f"m{number}") for number in range(35_000)]
    failed = list[BaseException]()

    def write() -> None:
        with closing(ShardWriter(config, "service", 0)) as writer:
            try:
                writer.write(frames, BATCH)
            except BaseException as error:  # noqa: BLE001 - shown at the end
                failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(200)
    assert failed == []
    with closing(ShardWriter(config, "service", 0)) as third:
        third.write([delivery(0, channel, "last")], BATCH + 1)
    ids = ids_of(read_all(bootstrap, channel, len(frames) + 1))
    assert ids == [*(f"m{number}" for number in range(len(frames))), "last"]
