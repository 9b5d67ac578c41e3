"""What a record of the journal tells about the time of a dispatch."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pika import BasicProperties

from airflow_delay_provider.brokers.rabbitmq.dispatch_times import DispatchTimes
from airflow_delay_provider.brokers.rabbitmq.receive import AmqpMessage

DUE = datetime(2030, 1, 1, 12, tzinfo=UTC)
MOMENT = timedelta(milliseconds=50)


class Stream:
    """Its records 0 to 9 are old, the next ones are new."""

    def __init__(self) -> None:
        self.asked: list[datetime] = []

    def first_offset_since(self, moment: datetime) -> int:
        self.asked.append(moment)
        return 10


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def times(stream: Stream) -> DispatchTimes:
    return DispatchTimes(stream.first_offset_since)


def record(offset: int = 0, *, second: datetime | None = None, ago: float = 0.0) -> AmqpMessage:
    headers: dict[str, Any] = {"x-stream-offset": offset}
    if second is not None:
        headers["x-death"] = [{"queue": "dispatch-log", "time": second.replace(tzinfo=None)}]
    return AmqpMessage(1, "", BasicProperties(headers=headers), b"", received_at=time.monotonic() - ago)


def after(seconds: float) -> datetime:
    return DUE + timedelta(seconds=seconds)


def test_a_record_that_is_read_at_once_tells_the_time(times: DispatchTimes) -> None:
    for second in (None, DUE):
        found = times.find(record(second=second), due=DUE, now=after(0.3))
        assert found is not None
        assert after(0.3) - MOMENT < found <= after(0.3)


def test_the_second_of_the_broker_is_rounded_up(times: DispatchTimes) -> None:
    """Rounded down, a message that is almost a second late would seem punctual."""
    assert times.find(record(second=after(5)), due=DUE, now=after(3600)) == after(6)


def test_no_message_seems_early(times: DispatchTimes) -> None:
    assert times.find(record(second=after(-5)), due=DUE, now=after(-3)) == DUE
    assert times.find(record(), due=DUE, now=after(-3)) == DUE


def test_the_time_when_a_record_came_counts_and_not_when_it_is_read(times: DispatchTimes) -> None:
    found = times.find(record(ago=59.5), due=DUE, now=after(60))
    assert found is not None
    assert after(0.5) - MOMENT < found <= after(0.5)


def test_without_a_time_of_the_broker_an_old_record_tells_nothing(times: DispatchTimes) -> None:
    assert times.find(record(9), due=DUE, now=after(116)) is None


def test_without_a_time_of_the_broker_a_new_record_of_a_late_message_tells_it(times: DispatchTimes) -> None:
    found = times.find(record(10), due=DUE, now=after(116))
    assert found is not None
    assert after(116) - MOMENT < found <= after(116)


def test_the_age_of_many_old_records_is_looked_up_once(times: DispatchTimes, stream: Stream) -> None:
    assert {times.find(record(offset), due=DUE, now=after(116 + offset)) for offset in range(10)} == {None}
    assert len(stream.asked) == 1
    assert stream.asked[0] <= after(115)
    times.find(record(10), due=DUE, now=after(200))
    assert len(stream.asked) == 2


def test_the_age_of_many_new_records_is_looked_up_about_once_a_second(times: DispatchTimes, stream: Stream) -> None:
    found = [times.find(record(10 + n), due=DUE, now=after(116 + n / 1000)) for n in range(3000)]
    assert None not in found
    assert 2 <= len(stream.asked) <= 4
    assert all(moment >= after(114) for moment in stream.asked)
