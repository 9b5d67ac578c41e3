from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.dispatch import channels as module
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import (
    AVAILABLE,
    ChannelCheck,
    ChannelDescription,
    ChannelStatus,
)
from airflow_delay_provider.brokers.kafka.dispatch.channels import Channels
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.message import Message


class Broker:
    """The descriptions of channels, and a trial that answers on request."""

    def __init__(self, **facts: Any) -> None:
        self.channels = {"orders": ChannelDescription(**facts)}
        self.asked: list[RecordPosition] = []
        self.answered: list[tuple[RecordPosition, str, ChannelCheck]] = []

    def watch(self, _channel: str) -> None:
        """All is known already."""

    def refresh_now(self) -> None:
        """There is nothing new."""

    def submit(self, position: RecordPosition, _envelope: wire.Envelope) -> None:
        self.asked.append(position)

    def results(self) -> Iterator[tuple[RecordPosition, str, ChannelCheck]]:
        while self.answered:
            yield self.answered.pop()


def channels_of(broker: Broker, *, compresses: bool = False) -> Channels:
    known = Channels(cast("Any", broker), cast("Any", broker), compresses=compresses)
    known.refresh()
    return known


def position(offset: int) -> RecordPosition:
    return RecordPosition(topic="inbox", partition=0, offset=offset)


def envelope(payload: bytes = b"x") -> wire.Envelope:
    message = Message(id="m", channel="orders", payload=payload, deliver_at=from_ms(0))
    return wire.Envelope(wire.encode_key(0, "m"), wire.encode_envelope(message, now_ms=0))


def test_messages_that_the_settings_rule_out_are_not_tried() -> None:
    """A trial for each of many such messages would take longer than they take to come."""
    broker = Broker(max_message_bytes=1_000)
    known = channels_of(broker)
    assert known.check(position(1), envelope(bytes(500))) is AVAILABLE
    assert known.check(position(2), envelope(bytes(990))).status is ChannelStatus.REFUSED
    assert broker.asked == []


def test_compressed_messages_may_be_small_enough_and_are_tried() -> None:
    broker = Broker(max_message_bytes=1_000)
    known = channels_of(broker, compresses=True)
    assert known.check(position(1), envelope(bytes(5_000))).status is ChannelStatus.UNKNOWN
    assert broker.asked == [position(1)]


@pytest.mark.parametrize(
    ("most_age_ms", "status"),
    [
        (0, ChannelStatus.REFUSED),
        (999, ChannelStatus.REFUSED),
        (None, ChannelStatus.AVAILABLE),
        (1_000, ChannelStatus.AVAILABLE),
    ],
)
def test_a_channel_that_takes_only_what_is_made_in_no_time_takes_nothing(
    most_age_ms: int | None, status: ChannelStatus
) -> None:
    check = channels_of(Broker(most_age_ms=most_age_ms)).check(position(1), envelope())
    assert check.status is status
    assert status is ChannelStatus.AVAILABLE or "message.timestamp.before.max.ms" in check.reason


def test_no_more_is_tried_than_gets_its_answer_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for their turn; a trial whose message has left meanwhile would delay those behind it."""
    monkeypatch.setattr(module, "MOST_ASKED", 3)
    broker = Broker()
    known = channels_of(broker)
    known.note_failure(position(99), "orders", cast("Any", module.KafkaError(module.KafkaError.INVALID_RECORD)))
    for offset in (*range(10), *range(10)):
        assert known.check(position(offset), envelope()).status is ChannelStatus.UNKNOWN
    assert broker.asked == [position(0), position(1), position(2)]
    broker.answered = [(position(1), "orders", AVAILABLE)]
    known.refresh()
    assert known.check(position(1), envelope()) is AVAILABLE
    known.check(position(7), envelope())
    assert broker.asked[3:] == [position(7)]


def test_old_trial_results_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_RESULTS", 10)
    broker = Broker()
    known = channels_of(broker)
    known.note_failure(position(99), "orders", cast("Any", module.KafkaError(module.KafkaError.INVALID_RECORD)))
    for offset in range(100):
        known.check(position(offset), envelope())
        broker.answered.append((position(offset), "orders", AVAILABLE))
        known.refresh()
    assert len(known._results) == 10


def test_a_channel_that_has_refused_a_message_takes_as_much_at_once_as_its_settings_say() -> None:
    """One message in each transaction would be too slow for a busy channel."""
    known = channels_of(Broker(max_message_bytes=50_000))
    unread = channels_of(Broker())
    for each in (known, unread):
        each.note_failure(position(1), "orders", cast("Any", module.KafkaError(module.KafkaError.INVALID_RECORD)))
    assert (known.max_bytes_of("orders"), unread.max_bytes_of("orders")) == (50_000, None)
    assert (known.has_failed(position(1)), known.has_failed(position(2))) == (True, False)
