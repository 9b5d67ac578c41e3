from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from airflow_delay_provider.brokers.kafka import destinations as module
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.commands import Place
from airflow_delay_provider.brokers.kafka.destinations import Destinations, Facts
from airflow_delay_provider.brokers.kafka.lane import GOOD, Opinion, Standing
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.message import Message


class Broker:
    """What the watch has seen, and a trial that answers when it is told to."""

    def __init__(self, **facts: Any) -> None:
        self.channels = {"orders": Facts(**facts)}
        self.asked: list[Place] = []
        self.answered: list[tuple[Place, str, Opinion]] = []

    def want(self, _channel: str) -> None:
        """All is known already."""

    def look_now(self) -> None:
        """There is nothing new."""

    def ask(self, place: Place, _envelope: wire.Envelope) -> None:
        self.asked.append(place)

    def answers(self) -> Iterator[tuple[Place, str, Opinion]]:
        while self.answered:
            yield self.answered.pop()


def destinations_of(broker: Broker, *, compresses: bool = False) -> Destinations:
    known = Destinations(cast("Any", broker), cast("Any", broker), compresses=compresses)
    known.refresh()
    return known


def place(offset: int) -> Place:
    return Place(topic="inbox", lane=0, offset=offset)


def envelope(payload: bytes = b"x") -> wire.Envelope:
    message = Message(id="m", channel="orders", payload=payload, deliver_at=from_ms(0))
    return wire.Envelope(wire.write_key(0, "m"), wire.write_envelope(message, now_ms=0))


def test_what_the_settings_tell_is_not_tried() -> None:
    """A trial for each of many such messages would take longer than they take to come."""
    broker = Broker(max_message_bytes=1_000)
    known = destinations_of(broker)
    assert known.judge(place(1), envelope(bytes(500))) is GOOD
    assert known.judge(place(2), envelope(bytes(990))).standing is Standing.REFUSED
    assert broker.asked == []


def test_what_is_compressed_may_be_small_enough_and_is_tried() -> None:
    broker = Broker(max_message_bytes=1_000)
    known = destinations_of(broker, compresses=True)
    assert known.judge(place(1), envelope(bytes(5_000))).standing is Standing.UNKNOWN
    assert broker.asked == [place(1)]


@pytest.mark.parametrize(
    ("most_age_ms", "standing"),
    [(0, Standing.REFUSED), (999, Standing.REFUSED), (None, Standing.GOOD), (1_000, Standing.GOOD)],
)
def test_a_channel_that_takes_only_what_is_made_in_no_time_takes_nothing(
    most_age_ms: int | None, standing: Standing
) -> None:
    opinion = destinations_of(Broker(most_age_ms=most_age_ms)).judge(place(1), envelope())
    assert opinion.standing is standing
    assert standing is Standing.GOOD or "message.timestamp.before.max.ms" in opinion.reason


def test_no_more_is_tried_than_gets_its_answer_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for their turn; a question whose message has left meanwhile would hold up those behind it."""
    monkeypatch.setattr(module, "MOST_ASKED", 3)
    broker = Broker()
    known = destinations_of(broker)
    known.note_failure(place(99), "orders", cast("Any", module.KafkaError(module.KafkaError.INVALID_RECORD)))
    for offset in (*range(10), *range(10)):
        assert known.judge(place(offset), envelope()).standing is Standing.UNKNOWN
    assert broker.asked == [place(0), place(1), place(2)]
    broker.answered = [(place(1), "orders", GOOD)]
    known.refresh()
    assert known.judge(place(1), envelope()) is GOOD
    known.judge(place(7), envelope())
    assert broker.asked[3:] == [place(7)]


def test_answers_that_nobody_needs_any_more_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_ANSWERS", 10)
    broker = Broker()
    known = destinations_of(broker)
    known.note_failure(place(99), "orders", cast("Any", module.KafkaError(module.KafkaError.INVALID_RECORD)))
    for offset in range(100):
        known.judge(place(offset), envelope())
        broker.answered.append((place(offset), "orders", GOOD))
        known.refresh()
    assert len(known._answers) == 10


def test_a_channel_that_has_refused_a_message_takes_as_much_at_once_as_its_settings_say() -> None:
    """One message in each transaction would be too slow for a busy channel."""
    known = destinations_of(Broker(max_message_bytes=50_000))
    unread = destinations_of(Broker())
    for each in (known, unread):
        each.note_failure(place(1), "orders", cast("Any", module.KafkaError(module.KafkaError.INVALID_RECORD)))
    assert (known.room_of("orders"), unread.room_of("orders")) == (50_000, None)
    assert (known.has_failed(place(1)), known.has_failed(place(2))) == (True, False)
