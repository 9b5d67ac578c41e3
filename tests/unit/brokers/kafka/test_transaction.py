"""A transaction whose producer does not do at once what it is asked to."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, KafkaException

from airflow_delay_provider.brokers.kafka.dispatch.transaction import ABORT_SECONDS, KafkaTransaction
from airflow_delay_provider.brokers.kafka.topology import Topology


class Channels:
    """Nothing is known of any."""

    def expect(self, channel: str) -> None: ...


class Producer:
    """One that waits for records which it sends again and again to a topic that is gone."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def begin_transaction(self) -> None: ...

    def abort_transaction(self, seconds: float) -> None:
        self.asked.append(seconds)
        if len(self.asked) < 3:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "records are on their way", retriable=True))


def test_an_abort_is_repeated_soon_because_only_that_drops_unsent_records() -> None:
    producer: Any = Producer()
    channels: Any = Channels()
    transaction = KafkaTransaction(producer, Topology(), channels)
    transaction.record_entry(0, bytes(16))
    transaction.abort()
    assert len(producer.asked) == 3
    assert max(producer.asked) <= ABORT_SECONDS
    assert not transaction.is_open
