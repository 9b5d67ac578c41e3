"""What a consumer has settled while its partitions go to others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from airflow_delay_provider.brokers.kafka import receive
from airflow_delay_provider.brokers.kafka.client import KafkaClients
from airflow_delay_provider.brokers.kafka.config import KafkaConfig
from airflow_delay_provider.brokers.kafka.receive import Receiver

CHANNEL = "orders"


class Record:
    """What there is in the channel."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return CHANNEL

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes:
        return b"x"

    def headers(self) -> list[tuple[str, bytes]]:
        return [("delay-id", b"m%d" % self._offset)]

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_000


class Member:
    """A consumer that is given the partition twice; the group refuses what it commits in between."""

    def __init__(self) -> None:
        self.committed_low: list[int] = []
        self.refuses = False
        self._waiting: list[Record] = []
        self._callbacks: dict[str, Any] = {}
        self._is_member = False

    def subscribe(self, _topics: list[str], **callbacks: Any) -> None:
        self._callbacks = callbacks

    def committed(self, places: list[TopicPartition], _seconds: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, -1001) for each in places]

    def assign(self, _places: list[TopicPartition]) -> None:
        self._waiting = [Record(offset) for offset in range(3)]

    def poll(self, _wait: float) -> Record | None:
        if self.refuses:
            self._callbacks["on_lost"](self, [])
            self.refuses = self._is_member = False
        if not self._is_member:
            self._is_member = True
            self._callbacks["on_assign"](self, [TopicPartition(CHANNEL, 0)])
        return self._waiting.pop(0) if self._waiting else None

    def consume(self, _count: int, _wait: float) -> list[Record]:
        records, self._waiting = self._waiting, []
        return records

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert not asynchronous
        if self.refuses:
            raise KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))
        self.committed_low += [each.offset for each in offsets]

    def close(self) -> None:
        pass


def test_acknowledging_a_message_that_was_reassigned_is_no_error_of_the_next_receive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B32: it is delivered again, here to the same consumer."""
    clients, member = KafkaClients(KafkaConfig.from_settings({}, host="localhost")), Member()
    monkeypatch.setattr(clients, "make_consumer", lambda _settings: member)
    facts = receive.admin.ChannelSettings(partitions=1)
    monkeypatch.setattr(receive.admin, "channel_settings", lambda *_: facts)
    for name, offset in (("log_starts", 0), ("stable_ends", 3)):
        monkeypatch.setattr(receive, name, lambda *_, offset=offset: {(CHANNEL, 0): offset})
    receiver = Receiver(clients)
    first = receiver.receive(CHANNEL, 3, timedelta(minutes=5))
    assert [each.message.id for each in first] == ["m0", "m1", "m2"]
    receiver.ack(first[0])
    assert member.committed_low == []
    member.refuses = True
    again = receiver.receive(CHANNEL, 3, timedelta(minutes=5))
    assert [each.message.id for each in again] == ["m0", "m1", "m2"]
    for each in again:
        receiver.ack(each)
    assert member.committed_low[-1] == 3
