"""A journal whose broker is slow to push its records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq import journal_stream
from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.journal import JournalReader
from airflow_delay_provider.brokers.rabbitmq.management import DispatchCheck
from airflow_delay_provider.brokers.rabbitmq.receive import AmqpMessage
from airflow_delay_provider.testing.clock import SettableClock

PATIENT_SECONDS = 2.0


class SlowStream:
    """Has records of these offsets for waiting readers; one at a time."""

    def __init__(self, offsets: list[int]) -> None:
        self._offsets = offsets
        self.attached_at: list[int | str] = []
        self.published: list[str] = []
        self.channel = SimpleNamespace(closed=None, send=lambda method, **_: self.published.append(method))
        self.is_open = True

    def attach(self, _connection: object, *, prefetch: int, offset: int | str) -> SlowStream:  # noqa: ARG002
        self.attached_at.append(offset)
        return self

    def take(self, _limit: int, *, wait: float) -> list[AmqpMessage]:
        if wait < PATIENT_SECONDS or not self._offsets:
            return []
        headers = {"x-stream-offset": self._offsets.pop(0)}
        return [AmqpMessage(1, "", BasicProperties(headers=headers), b"")]

    def ack(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...


def reader_of(stream: SlowStream, monkeypatch: pytest.MonkeyPatch) -> JournalReader:
    monkeypatch.setattr(journal_stream, "_attach", stream.attach)
    connection: Any = SimpleNamespace(config=RabbitMQConfig())
    return JournalReader(lambda: connection, SettableClock(), DispatchCheck(RabbitMQConfig()))


def test_a_reader_does_not_take_a_slow_journal_for_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who may only read would be refused if it published a record there."""
    stream = SlowStream([7])
    assert reader_of(stream, monkeypatch).end() == "6.0"
    assert stream.published == []


def test_a_reader_does_not_take_a_slow_journal_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would begin again at the first record."""
    stream = SlowStream([5, 6, 7])
    assert reader_of(stream, monkeypatch).read("7.0", 10) == []
    assert stream.attached_at == ["last", 7]


def test_a_reader_begins_at_the_start_of_a_journal_that_was_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SlowStream([0])
    assert reader_of(stream, monkeypatch).read("7.0", 10) == []
    assert stream.attached_at == ["last", "first"]
