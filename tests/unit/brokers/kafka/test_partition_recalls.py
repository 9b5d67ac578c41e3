from __future__ import annotations

import pytest

from airflow_delay_provider.brokers.kafka.journal import CommandResult
from airflow_delay_provider.brokers.kafka.recall import RecordPosition
from airflow_delay_provider.domain.lifecycle import Change
from tests.unit.brokers.kafka.bench import Bench

HOUR_MS = 3_600_000


@pytest.fixture
def bench() -> Bench:
    return Bench()


def resting(bench: Bench, message_id: str = "m1", delay_ms: int = HOUR_MS) -> RecordPosition:
    bench.schedule(message_id, delay_ms)
    bench.work()
    position = bench.rung_of(message_id)
    assert position is not None
    return position


@pytest.mark.parametrize("restarts", [False, True])
def test_a_message_in_a_rung_is_cancelled_and_passed_over_when_its_turn_comes(bench: Bench, *, restarts: bool) -> None:
    """A27, D19, E10"""
    position = resting(bench)
    bench.command("m1", position)
    bench.work()
    assert bench.answers == [CommandResult("m1 cancelled", accepted=True)]
    assert bench.kafka.recalled == {position}
    if restarts:
        bench.restart()
    bench.pass_to(2 * HOUR_MS)
    assert bench.delivered == []
    assert bench.kafka.recalled == set()
    assert bench.recorded == [("m1", Change.SCHEDULED), ("m1", Change.CANCELLED)]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_message_in_memory_is_cancelled_at_once(bench: Bench, *, restarts: bool) -> None:
    """A27, D19"""
    position = bench.schedule("m1", 1_000)
    bench.work()
    bench.command("m1", position)
    bench.work()
    assert bench.kafka.committed[bench.topology.inbox] == (1, "")
    if restarts:
        bench.restart()
    bench.pass_to(2_000)
    assert (bench.delivered, bench.kafka.recalled) == ([], set())
    assert bench.recorded == [("m1", Change.SCHEDULED), ("m1", Change.CANCELLED)]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_message_that_is_not_read_yet_is_cancelled(bench: Bench, *, restarts: bool) -> None:
    """A27, D19: it was scheduled while no dispatcher ran."""
    position = bench.schedule("m1", 1_000)
    bench.command("m1", position)
    bench.dispatcher.fetch(bench.topology.control)
    bench.dispatcher.advance(bench.now_ms)
    bench.dispatcher.commit()
    assert bench.kafka.recalled == {position}
    if restarts:
        bench.restart()
    bench.pass_to(2_000)
    assert (bench.delivered, bench.kafka.recalled) == ([], set())
    assert bench.recorded == [("m1", Change.CANCELLED)]


def test_a_message_that_is_moved_before_it_is_read_is_recorded_as_a_whole(bench: Bench) -> None:
    """A27: its record is passed over, so no other entry describes it."""
    position = bench.schedule("m1", 1_000)
    bench.command("m1", position, Change.RESCHEDULED, delay_ms=5_000)
    bench.dispatcher.fetch(bench.topology.control)
    bench.dispatcher.advance(bench.now_ms)
    bench.pass_to(5_000)
    assert bench.delivered == [("m1", 5_000)]
    assert bench.recorded == [("m1", Change.RESCHEDULED), ("m1", Change.DISPATCHED)]
    message = next(each for each in bench.kafka.journal if each.change).entry("p").message
    assert message is not None
    assert message.payload == b"x"


@pytest.mark.parametrize("change", [Change.CANCELLED, Change.RESCHEDULED, Change.EXPEDITED])
def test_a_message_that_has_moved_on_is_not_where_it_was(bench: Bench, change: Change) -> None:
    """B22: refused, so that the caller searches again."""
    position = resting(bench)
    bench.pass_to(HOUR_MS - 60_000)
    bench.command("m1", position, change)
    bench.pass_to(HOUR_MS)
    assert bench.answers == [CommandResult(f"m1 {change.value}", accepted=False)]
    assert bench.delivered == [("m1", HOUR_MS)]
    assert bench.recorded == [("m1", Change.SCHEDULED), ("m1", Change.DISPATCHED)]


def test_a_delivered_message_cannot_be_called_back(bench: Bench) -> None:
    """B22"""
    position = bench.schedule("m1", 0)
    bench.work()
    bench.command("m1", position)
    bench.work()
    assert bench.answers == [CommandResult("m1 cancelled", accepted=False)]
    assert bench.delivered == [("m1", 0)]


def test_a_message_is_called_back_once(bench: Bench) -> None:
    """A29: of two concurrent commands one is refused as too late."""
    position = resting(bench)
    bench.command("m1", position, Change.RESCHEDULED, delay_ms=60_000)
    bench.command("m1", position)
    bench.pass_to(2 * HOUR_MS)
    assert [result.accepted for result in bench.answers] == [True, False]
    assert bench.delivered == [("m1", 60_000)]


def test_a_place_that_no_partition_has_is_refused(bench: Bench) -> None:
    bench.command("m1", RecordPosition(topic="orders", partition=1, offset=0))
    bench.work()
    assert bench.answers == [CommandResult("m1 cancelled", accepted=False)]


@pytest.mark.parametrize("delay_ms", [0, 1_000, 60_000, 5 * HOUR_MS])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_moved_message_comes_once_at_its_new_time(bench: Bench, delay_ms: int, *, restarts: bool) -> None:
    """A27, B59: earlier or later than before, carried by the command itself."""
    position = resting(bench)
    bench.command("m1", position, Change.RESCHEDULED, delay_ms=delay_ms)
    bench.work()
    if restarts:
        bench.restart()
    bench.pass_to(6 * HOUR_MS)
    assert bench.delivered == [("m1", delay_ms)]
    assert bench.recorded == [("m1", Change.SCHEDULED), ("m1", Change.RESCHEDULED), ("m1", Change.DISPATCHED)]
    assert len(bench.answers) == 1


def test_an_expedited_message_comes_now_and_in_the_order_of_the_new_times(bench: Bench) -> None:
    """B53"""
    position = resting(bench)
    bench.schedule("m2", 1_000)
    bench.work()
    bench.command("m1", position, Change.EXPEDITED)
    bench.pass_to(1_000)
    assert bench.delivered == [("m1", 0), ("m2", 1_000)]
    assert bench.recorded[2] == ("m1", Change.EXPEDITED)


def test_a_message_that_waits_in_the_command_that_moved_it_can_be_called_back_there(bench: Bench) -> None:
    """A27"""
    first = bench.command("m1", resting(bench), Change.RESCHEDULED, delay_ms=1_000)
    bench.work()
    bench.command("m1", first)
    bench.restart()
    bench.pass_to(2 * HOUR_MS)
    assert [result.accepted for result in bench.answers] == [True, True]
    assert bench.delivered == []
    assert bench.recorded[1:] == [("m1", Change.RESCHEDULED), ("m1", Change.CANCELLED)]


def test_a_command_with_an_unreadable_message_is_dead_lettered_when_it_is_due(bench: Bench) -> None:
    """B37"""
    position = bench.command("m1", resting(bench), Change.RESCHEDULED, delay_ms=1_000)
    [record] = bench.kafka.logs[position.topic].records
    assert record.value is not None
    bench.kafka.logs[position.topic].records = [record._replace(value=record.value[:-40])]
    bench.schedule("m2", 2_000)
    bench.pass_to(2_000)
    assert bench.delivered == [("m2", 2_000)]
    assert len(bench.kafka.dead) == 1


def test_a_command_that_names_a_record_of_another_partition_is_refused(bench: Bench) -> None:
    """B37: the record of this partition at the same offset is another message."""
    position = bench.schedule("m1", 1_000)
    bench.command("m1", RecordPosition(topic=position.topic, partition=position.partition + 1, offset=position.offset))
    bench.pass_to(1_000)
    assert [result.accepted for result in bench.answers] == [False]
    assert bench.delivered == [("m1", 1_000)]
