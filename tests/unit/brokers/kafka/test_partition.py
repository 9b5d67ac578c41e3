from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import progress, wire
from airflow_delay_provider.brokers.kafka.dispatch import partition
from airflow_delay_provider.brokers.kafka.dispatch.channel_status import ChannelCheck, ChannelStatus
from airflow_delay_provider.brokers.kafka.dispatch.partition_queue import PartitionQueue, Record
from airflow_delay_provider.brokers.kafka.progress import Progress
from airflow_delay_provider.brokers.kafka.topology import COVER_MS, Topology
from airflow_delay_provider.domain.lifecycle import Change
from tests.unit.brokers.kafka.bench import START_MS, Bench
from tests.unit.brokers.kafka.model import MISSING, Log

DAY_MS = 86_400_000
HOUR_MS = 3_600_000


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- the path of a message -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay_ms", "hold_ms"),
    [
        (2_499, None),
        (2_500, 2_000),
        (4_499, 2_000),
        (4_500, 4_000),
        (8_500, 8_000),
        (60_000, 32_000),
        (HOUR_MS, 2_048_000),
        (DAY_MS, 65_536_000),
    ],
)
def test_a_message_rests_first_where_its_delay_belongs(bench: Bench, delay_ms: int, hold_ms: int | None) -> None:
    """D14, E4, E5: the longest rest that leaves half a second to put it in order."""
    bench.schedule("m1", delay_ms)
    bench.work()
    position = bench.rung_of("m1")
    assert (position and position.topic) == (hold_ms and bench.topology.rung(hold_ms))


def test_a_message_that_is_not_due_goes_to_shorter_and_shorter_rests(bench: Bench) -> None:
    """E7: and never to the same one again."""
    bench.schedule("m1", 300_000)
    rests = []
    while not bench.delivered:
        bench.work()
        if (position := bench.rung_of("m1")) and position.topic not in rests:
            rests.append(position.topic)
        ready_ms = bench.dispatcher.partition.next_ready_ms()
        if ready_ms is not None:
            bench.set_clock(ready_ms)
    assert rests == [bench.topology.rung(hold_ms) for hold_ms in (256_000, 32_000, 8_000, 2_000)]
    assert bench.kafka.rests == {b"m1": 4}


@pytest.mark.parametrize("delay_ms", [1, 999, 2_499, 2_500, 10_000, HOUR_MS + 1, 3 * DAY_MS + 7])
def test_a_message_comes_in_the_millisecond_in_which_it_is_due(bench: Bench, delay_ms: int) -> None:
    """D8, E8, E12: neither early nor a tick late."""
    bench.schedule("m1", delay_ms)
    bench.pass_to(delay_ms - 1)
    assert bench.delivered == []
    bench.pass_to(delay_ms)
    assert bench.delivered == [("m1", delay_ms)]


def test_scheduled_messages_are_appended_first_and_carried_unchanged(bench: Bench) -> None:
    """D13: the delay is decided when the record is read, and the record stays what it was until it is delivered."""
    key, value = bench.envelope("m1", DAY_MS, payload=b"\x00\xff", headers={"trace": "a1"})
    bench.put(bench.topology.inbox, key, value)
    for hours in (0, 6, 12, 18):
        bench.pass_to(hours * HOUR_MS)
        position = bench.rung_of("m1")
        assert position is not None
        [record] = bench.kafka.logs[position.topic].read(position.offset, 1)
        assert (record.key, record.value) == (key, value)
    bench.pass_to(DAY_MS)
    assert bench.kafka.delivered[0].envelope.payload == b"\x00\xff"


def test_a_plain_record_with_headers_is_scheduled_too(bench: Bench) -> None:
    """D15: key, value, topic and time, by any Kafka producer."""
    headers = [
        (protocol.CHANNEL, b"orders"),
        (protocol.DELIVER_AFTER_MS, b"60000"),
        (protocol.ID, b"m1"),
        ("trace", b"a1"),
    ]
    bench.put(bench.topology.inbox, b"customer", b"value", headers)
    bench.put(bench.topology.inbox, None, b"value", [(protocol.CHANNEL, b"orders"), (protocol.DELIVER_AT, b"0")])
    bench.pass_to(60_000)
    assert bench.delivered == [(f"{bench.topology.inbox}-1-1", 0), ("m1", 60_000)]
    envelope = bench.kafka.delivered[1].envelope
    assert (envelope.channel, envelope.key, envelope.payload) == ("orders", b"customer", b"value")
    assert ("trace", b"a1") in envelope.record_headers()


def test_everything_that_happens_is_recorded_once_with_its_times(bench: Bench) -> None:
    """A45, B41"""
    bench.schedule("m1", 10_000)
    bench.restart()
    bench.pass_to(9_000)
    bench.restart()
    bench.set_clock(START_MS + 11_000)
    bench.work()
    scheduled, dispatched = bench.kafka.journal
    assert (scheduled.change, scheduled.at_ms, scheduled.deliver_at_ms) == (
        Change.SCHEDULED,
        START_MS,
        START_MS + 10_000,
    )
    assert (dispatched.change, dispatched.at_ms - dispatched.deliver_at_ms) == (Change.DISPATCHED, 1_000)
    assert scheduled.entry("p").message is not None


def test_a_requeued_message_is_recorded_with_the_reason(bench: Bench) -> None:
    """A23"""
    bench.schedule("m1", 1_000, change=Change.REQUEUED, reason="the service is down")
    bench.pass_to(1_000)
    assert bench.recorded == [("m1", Change.REQUEUED), ("m1", Change.DISPATCHED)]
    assert bench.kafka.journal[0].reason == b"the service is down"


def test_a_message_whose_channel_is_missing_is_dead_lettered_with_the_reason(bench: Bench) -> None:
    """A25: and those behind it are delivered."""
    bench.schedule("m1", 1_000, channel=MISSING)
    bench.schedule("m2", 1_000)
    bench.pass_to(1_000)
    assert bench.delivered == [("m2", 1_000)]
    assert bench.recorded[2:] == [("m1", Change.DEAD_LETTERED), ("m2", Change.DISPATCHED)]
    assert bench.kafka.journal[2].reason == b"there is no such topic"
    assert len(bench.kafka.dead) == 1


# -- order ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 20_000), st.integers(0, 600_000) | st.integers(0, 3_000)), min_size=2, max_size=12
    ),
    st.sampled_from([2, 4, 16]),
)
@settings(max_examples=50)
def test_messages_are_delivered_in_the_order_of_their_due_times_on_any_path(
    schedules: list[tuple[int, int]], radix: int
) -> None:
    """B53, B62, D17, E12: also those that were scheduled late and those that rested elsewhere."""
    bench = Bench(Topology(radix=radix))
    for number, (after_ms, delay_ms) in enumerate(sorted(schedules)):
        bench.pass_to(after_ms)
        bench.schedule(f"m{number}", delay_ms, key="k")
        bench.work()
    bench.pass_to(700_000)
    due_ms = {f"m{number}": sum(schedule) for number, schedule in enumerate(sorted(schedules))}
    assert dict(bench.delivered) == due_ms
    assert [at_ms for _, at_ms in bench.delivered] == sorted(due_ms.values())


def test_messages_that_are_overdue_come_at_once_and_in_order(bench: Bench) -> None:
    """B27, B53: after an outage, as far as they are read together."""
    delays_ms = {"far": DAY_MS, "near": HOUR_MS, "soon": 2_000}
    for id, delay_ms in delays_ms.items():
        bench.schedule(id, delay_ms)
    bench.work()
    bench.restart()
    bench.set_clock(START_MS + 2 * DAY_MS)
    bench.schedule("late", -5 * HOUR_MS)
    bench.work()
    assert bench.delivered == [(id, 2 * DAY_MS) for id in ("soon", "near", "far", "late")]


def test_a_restart_in_the_last_moments_changes_nothing(bench: Bench) -> None:
    """D11, D12"""
    for number in range(20):
        bench.schedule(f"m{number}", 2_000 + 50 * number)
    bench.pass_to(2_500)
    bench.restart()
    bench.pass_to(4_000)
    assert bench.delivered == [(f"m{number}", 2_000 + 50 * number) for number in range(20)]
    assert [change for _, change in bench.recorded].count(Change.SCHEDULED) == 20


# -- how much there is to do ---------------------------------------------------------------------------------------


def test_only_messages_that_are_due_soon_are_in_memory(bench: Bench) -> None:
    """D5, D6, E6: of a thousand messages that rest, nothing is known but the heads of their rungs."""
    for number in range(1_000):
        bench.schedule(f"m{number}", HOUR_MS + number)
    bench.work()
    assert bench.kafka.committed[bench.topology.inbox] == (1_000, "")
    bench.restart()
    for topic in bench.kafka.logs:
        bench.dispatcher.fetch(topic, 1)
    assert bench.dispatcher.advance(bench.now_ms) == 0
    assert bench.dispatcher.partition.next_ready_ms() == START_MS + 2_048_000


def test_a_record_is_not_read_before_its_hold_time_ends(bench: Bench) -> None:
    """E3, E6"""
    bench.schedule("m1", HOUR_MS)
    bench.work()
    assert bench.dispatcher.partition.next_ready_ms() == START_MS + 2_048_000
    bench.set_clock(START_MS + 2_047_999)
    assert bench.dispatcher.advance(bench.now_ms) == 0
    bench.set_clock(START_MS + 2_048_000)
    assert bench.dispatcher.advance(bench.now_ms) == 1


def test_without_messages_there_is_nothing_to_do(bench: Bench) -> None:
    bench.work()
    assert bench.dispatcher.partition.next_ready_ms() is None
    assert [*bench.dispatcher.partition.progress()] == []


def test_a_partition_does_about_as_many_steps_as_it_may(bench: Bench) -> None:
    for number in range(30):
        bench.schedule(f"m{number}", -1)
    bench.dispatcher.fetch_all()
    assert bench.dispatcher.advance(bench.now_ms, limit=10) == 20
    bench.work()
    assert len(bench.delivered) == 30


def test_a_large_transaction_takes_in_no_more_and_still_dispatches_due_messages(bench: Bench) -> None:
    """D6: due messages would wait until the broker has stored a flood of large ones."""
    bench.schedule("due", 1_000)
    bench.work()
    bench.set_clock(START_MS + 1_000)
    for number in range(10):
        bench.schedule(f"large-{number}", 60_000, payload=bytes(300_000))
    bench.dispatcher.fetch_all()
    assert bench.dispatcher.advance(bench.now_ms) == 2 + 1
    bench.dispatcher.commit()
    assert bench.delivered == [("due", 1_000)]
    bench.work()
    assert all(bench.rung_of(f"large-{number}") for number in range(10))


def test_a_flood_of_large_records_in_one_partition_takes_no_turn_from_another(bench: Bench) -> None:
    """D6"""
    for _ in range(10):
        bench.put(bench.topology.control, b"k", bytes(300_000))
        bench.put(bench.topology.rung(2_000), b"k", bytes(300_000))
    bench.schedule("other", 1_000)
    bench.set_clock(START_MS + 1_000)
    bench.dispatcher.fetch_all()
    bench.dispatcher.advance(bench.now_ms)
    bench.dispatcher.commit()
    assert bench.delivered == [("other", 1_000)]
    assert len(bench.kafka.dead) == 10 + 2


def test_a_partition_with_full_memory_waits_for_its_next_due_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: it takes in no more, and does not spin meanwhile."""
    monkeypatch.setattr(partition, "MAX_DUE_SOON", 2)
    for number, delay_ms in enumerate((1_000, 900, 800, HOUR_MS)):
        bench.schedule(f"m{number}", delay_ms)
    bench.work()
    assert bench.dispatcher.partition.next_ready_ms() == START_MS + 900
    assert len(bench.recorded) == 2
    bench.pass_to(HOUR_MS)
    assert bench.delivered == [("m1", 900), ("m2", 900), ("m0", 1_000), ("m3", HOUR_MS)]


def test_large_messages_fill_the_memory_of_a_partition_sooner(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6"""
    monkeypatch.setattr(partition, "MAX_DUE_SOON_BYTES", 1_500)
    for number in range(4):
        bench.schedule(f"m{number}", 1_000 + number, payload=b"x" * 1_000)
    bench.work()
    assert len(bench.recorded) == 2
    assert bench.dispatcher.partition.next_ready_ms() == START_MS + 1_000
    bench.restart()
    bench.work()
    assert len(bench.recorded) == 2
    bench.pass_to(2_000)
    assert [id for id, _ in bench.delivered] == [f"m{number}" for number in range(4)]


def test_a_partition_whose_note_would_not_fit_is_not_read_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6"""
    monkeypatch.setattr("airflow_delay_provider.brokers.kafka.progress.FEW_OPEN", 2)
    monkeypatch.setattr("airflow_delay_provider.brokers.kafka.progress.SHORT_SPAN", 3)
    for number in range(6):
        bench.schedule(f"m{number}", 1_000 + number)
    bench.work()
    assert len(bench.recorded) == 3
    assert bench.dispatcher.partition.next_ready_ms() == START_MS + 1_000
    bench.restart()
    bench.work()
    assert len(bench.recorded) == 3
    bench.pass_to(2_000)
    assert [id for id, _ in bench.delivered] == [f"m{number}" for number in range(6)]


# -- clocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew_ms", [-30 * DAY_MS, -HOUR_MS, -3_000, -100, 100, 3_000, HOUR_MS, 30 * DAY_MS])
def test_a_broker_whose_clock_is_wrong_makes_no_message_early_or_late(skew_ms: int) -> None:
    """E3, E12: and none is written again and again."""
    bench = Bench(skew_ms=skew_ms)
    delays_ms = {f"m{delay_ms}": delay_ms for delay_ms in (500, 5_000, 300_000, HOUR_MS, DAY_MS, 30 * DAY_MS)}
    for id, delay_ms in delays_ms.items():
        bench.schedule(id, delay_ms)
    bench.pass_to(31 * DAY_MS)
    assert bench.delivered == [*delays_ms.items()]
    assert max(bench.kafka.rests.values()) <= len(bench.topology.ladder.holds_ms)


@pytest.mark.parametrize(
    ("hold_ms", "written_ms", "due_ms", "ready_ms"),
    [
        (8_000, 0, 9_000, 8_000),
        (8_000, 0, 16_000, 8_000),
        (8_000, 500, 9_000, 8_500),
        (8_000, 5_000, 9_000, 8_500),
        (8_000, -HOUR_MS, 16_000, 7_501),
        (8_000, -HOUR_MS, 9_000, 501),
        (COVER_MS, 0, 10 * COVER_MS, COVER_MS),
        (0, 5_000, 9_000, -START_MS),
    ],
)
def test_a_turn_comes_after_the_rest_as_far_as_the_due_time_allows(
    hold_ms: int, written_ms: int, due_ms: int, ready_ms: int
) -> None:
    """E6: the broker's clock counts, between the bounds that follow from the due time."""
    queue = PartitionQueue("topic", hold_ms, Progress(0))
    record = Record(0, START_MS + written_ms, wire.encode_key(START_MS + due_ms, "m1"), b"")
    assert queue.ready_ms(record) == START_MS + ready_ms


def test_a_message_that_waits_long_behind_one_that_waits_longer_is_not_held_up_by_it() -> None:
    """C4: in the longest rung, whatever the clock of the broker."""
    bench = Bench(skew_ms=-HOUR_MS)
    bench.schedule("far", 3650 * DAY_MS)
    bench.schedule("near", 80 * DAY_MS)
    bench.pass_to(80 * DAY_MS)
    assert bench.delivered == [("near", 80 * DAY_MS)]


# -- another ladder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(16, 2), (2, 16), (4, 7)])
def test_messages_in_rungs_of_another_radix_go_on_with_the_new_one(before: int, after: int) -> None:
    """D3, D4, D9, D10: finer or coarser, at any time."""
    bench = Bench(Topology(radix=before))
    delays_ms = {f"m{delay_ms}": delay_ms for delay_ms in (5_000, 300_000, HOUR_MS, DAY_MS)}
    for id, delay_ms in delays_ms.items():
        bench.schedule(id, delay_ms)
    bench.pass_to(2_000)
    bench.topology = bench.kafka.topology = Topology(radix=after)
    for hold_ms in bench.topology.ladder.holds_ms:
        bench.kafka.logs.setdefault(bench.topology.rung(hold_ms), Log())
    bench.restart()
    bench.pass_to(DAY_MS)
    assert bench.delivered == [*delays_ms.items()]


# -- what does not belong there ------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["inbox", "rung.2000ms"])
def test_an_envelope_of_an_unknown_version_is_dead_lettered_and_not_lost(bench: Bench, topic: str) -> None:
    key, value = bench.envelope("m1", 1_000)
    bench.put(f"{bench.topology.prefix}.{topic}", key, b"\x07" + value[1:])
    bench.schedule("m2", 3_000)
    bench.pass_to(3_000)
    assert [(each.key, each.value) for each in bench.kafka.dead] == [(key, b"\x07" + value[1:])]
    assert bench.delivered == [("m2", 3_000)]


@pytest.mark.parametrize("topic", ["inbox", "control", "rung.2000ms"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, None),
        (None, b"value"),
        (b"key", b"value"),
        (wire.encode_key(START_MS, "m1"), None),
        (wire.encode_key(START_MS, "m1"), b""),
        (wire.encode_key(START_MS, "m1"), b"\x01 and nothing else"),
        (wire.encode_key(START_MS, "m1"), b"\x01" + b"\xff" * 60),
        (wire.encode_key(START_MS, ""), b"value"),
    ],
)
def test_an_invalid_record_is_dead_lettered_once_and_stops_no_others(
    bench: Bench, topic: str, key: bytes | None, value: bytes | None
) -> None:
    """B37"""
    bench.put(f"{bench.topology.prefix}.{topic}", key, value)
    bench.schedule("m2", 4_000)
    bench.pass_to(2_600)
    bench.restart()
    bench.pass_to(4_000)
    assert [(each.key, each.value) for each in bench.kafka.dead] == [(key, value)]
    assert bench.delivered == [("m2", 4_000)]
    assert bench.recorded == [("m2", Change.SCHEDULED), ("m2", Change.DISPATCHED)]


# -- channels that are not known, or not available -------------------------------------------------------------------


def test_a_message_whose_channel_is_not_known_yet_waits_for_that_and_keeps_its_order(bench: Bench) -> None:
    """C4: others are delivered meanwhile."""
    bench.kafka.checks["orders"] = ChannelCheck(ChannelStatus.UNKNOWN)
    bench.schedule("m1", 1_000, key="k")
    bench.schedule("m2", 1_010, key="k")
    bench.schedule("other", 1_005, channel="invoices")
    bench.set_clock(START_MS + 1_020)
    bench.work()
    assert bench.kafka.expected == {"orders", "invoices"}
    assert [id for id, _ in bench.delivered] == ["other"]
    bench.kafka.checks.clear()
    bench.pass_to(2_000)
    assert [id for id, _ in bench.delivered] == ["other", "m1", "m2"]


def test_a_backlog_for_a_channel_that_is_not_known_yet_comes_as_soon_as_it_is(bench: Bench) -> None:
    """A dispatcher that begins knows of no channel for a moment."""
    bench.kafka.checks["orders"] = ChannelCheck(ChannelStatus.UNKNOWN)
    for number in range(1_000):
        bench.schedule(f"m{number}", 1_000)
    bench.set_clock(START_MS + 5_000)
    bench.work()
    bench.kafka.checks.clear()
    bench.pass_to(5_100)
    assert len(bench.delivered) == 1_000


def test_messages_that_wait_for_their_channel_keep_no_partition_from_being_read_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They rest again before there is no room left for what lies behind them, and nothing of them is lost."""
    monkeypatch.setattr(progress, "FEW_OPEN", 10)
    monkeypatch.setattr(progress, "SHORT_SPAN", 40)
    bench.kafka.checks["orders"] = ChannelCheck(ChannelStatus.UNKNOWN)
    for number in range(30):
        bench.schedule(f"waits-{number}", 1_000)
    for number in range(100):
        bench.schedule(f"other-{number}", 2_000, channel="invoices")
    bench.pass_to(2_100)
    assert len(bench.delivered) == 100
    bench.kafka.checks.clear()
    bench.pass_to(15_000)
    assert len({id for id, _ in bench.delivered}) == len(bench.delivered) == 130


def test_large_messages_that_wait_for_their_channel_leave_room_for_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "MAX_DUE_SOON_BYTES", 5_000)
    monkeypatch.setattr(partition, "MANY_UNKNOWN_BYTES", 2_000)
    bench.kafka.checks["orders"] = ChannelCheck(ChannelStatus.UNKNOWN)
    for number in range(30):
        bench.schedule(f"waits-{number}", 1_000, payload=b"x" * 1_000)
    for number in range(10):
        bench.schedule(f"other-{number}", 2_000, channel="invoices")
    bench.pass_to(2_100)
    assert len(bench.delivered) == 10
    bench.kafka.checks.clear()
    bench.pass_to(15_000)
    assert len({id for id, _ in bench.delivered}) == len(bench.delivered) == 40


def test_a_message_whose_channel_cannot_be_written_to_now_rests_again(bench: Bench) -> None:
    """A25: what may pass ends no message."""
    bench.kafka.checks["orders"] = ChannelCheck(ChannelStatus.UNAVAILABLE, "no leader")
    bench.schedule("m1", 1_000)
    bench.pass_to(25_000)
    assert bench.delivered == []
    assert bench.rung_of("m1") is not None
    bench.kafka.checks.clear()
    bench.pass_to(40_000)
    assert [id for id, _ in bench.delivered] == ["m1"]
    assert bench.recorded == [("m1", Change.SCHEDULED), ("m1", Change.DISPATCHED)]
    assert bench.kafka.journal[-1].deliver_at_ms == START_MS + 1_000


def test_a_record_forged_into_a_rung_that_is_too_short_delays_no_record_behind_it(bench: Bench) -> None:
    """B37: it goes where its delay belongs."""
    bench.put(bench.topology.rung(2_000), *bench.envelope("forged", DAY_MS))
    bench.schedule("m1", 3_000)
    bench.pass_to(3_000)
    assert bench.delivered == [("m1", 3_000)]
    bench.pass_to(DAY_MS)
    assert bench.delivered[1:] == [("forged", DAY_MS)]


@pytest.mark.parametrize("skew_ms", [0, -HOUR_MS])
def test_a_record_forged_into_a_rung_behind_others_delays_no_record_either(skew_ms: int) -> None:
    """B37: when it is the first one, less is left of its delay than would show that it does not belong there."""
    bench = Bench(skew_ms=skew_ms)
    for id, delay_ms in (("m1", 8_499), ("forged", 11_000), ("m2", 5_000)):
        bench.put(bench.topology.rung(4_000), *bench.envelope(id, delay_ms))
    bench.pass_to(11_000)
    assert bench.delivered == [("m2", 5_000), ("m1", 8_499), ("forged", 11_000)]


def test_a_record_that_was_given_up_is_dead_lettered_and_recorded(bench: Bench) -> None:
    bench.schedule("m1", 60_000)
    bench.schedule("m2", 1_000)
    bench.dispatcher.fetch_all()
    bench.dispatcher.partition.queues[bench.topology.inbox].given_up[0] = ("for no known reason", True)
    bench.pass_to(1_000)
    assert [each.offset for each in bench.kafka.dead] == [0]
    assert bench.delivered == [("m2", 1_000)]
    assert bench.recorded[:2] == [("m1", Change.SCHEDULED), ("m1", Change.DEAD_LETTERED)]
