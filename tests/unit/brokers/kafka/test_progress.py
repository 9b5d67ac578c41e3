from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka.progress import (
    FEW_OPEN,
    SHORT_SPAN,
    Progress,
    note_of,
    progress_of,
    service_of,
)
from tests.unit.brokers.kafka.model import MAX_NOTE

gaps = st.integers(1, 3) | st.integers(1, 300) | st.integers(1, 100_000)


def again(progress: Progress) -> Progress:
    """The progress with which another dispatcher continues."""
    return Progress(progress.low, progress.note())


def begun(*offsets: int, done: set[int] | None = None) -> Progress:
    progress = Progress(offsets[0])
    for offset in offsets:
        progress.begin(offset)
    for offset in done or ():
        progress.end(offset)
    return progress


def test_a_new_partition_has_nothing_open_and_everything_waits() -> None:
    progress = Progress(7)
    assert (progress.low, progress.next, progress.note()) == (7, 7, "")
    assert progress.is_waiting(7)
    assert not progress.is_waiting(6)


def test_records_that_end_in_order_need_no_note() -> None:
    progress = begun(7, 8, 9, done={7, 8, 9})
    assert (progress.low, progress.note()) == (10, "")


def test_records_that_are_done_behind_an_open_one_are_noted() -> None:
    """D11"""
    progress = begun(7, 8, 9, 12, done={8, 12})
    assert progress.low == 7
    taken_over = again(progress)
    assert [*taken_over.open] == [7, 9]
    assert [taken_over.begin(offset) for offset in (7, 8, 9, 12, 13)] == [True, False, True, False, True]


def test_gaps_in_the_offsets_are_no_records() -> None:
    """Marks of transactions and aborted records use up offsets."""
    progress = begun(100, 1_000, 50_000, done={100, 1_000})
    assert (progress.low, progress.next) == (50_000, 50_001)
    assert not progress.is_waiting(2_000)


def test_a_record_that_is_begun_again_keeps_its_place() -> None:
    taken_over = again(begun(7, 8, 9, done={8}))
    assert taken_over.begin(7)
    taken_over.end(7)
    assert taken_over.low == 9
    assert not taken_over.begin(7)


def test_a_record_cannot_end_twice() -> None:
    progress = begun(7, done={7})
    with pytest.raises(KeyError):
        progress.end(7)


@given(st.lists(st.tuples(gaps, st.booleans(), st.integers(0, 50)), max_size=60), st.integers(0, 10**12))
def test_a_successor_handles_exactly_the_unfinished_records(steps: list[tuple[int, bool, int]], start: int) -> None:
    """D11, D12: at any moment, with any order of beginnings and ends."""
    progress, offset, open_offsets, ended = Progress(start), start, list[int](), set[int]()
    for gap, ends_one, which in steps:
        assert progress.begin(offset)
        open_offsets.append(offset)
        offset += gap
        if ends_one and open_offsets:
            done = open_offsets.pop(which % len(open_offsets))
            progress.end(done)
            ended.add(done)
        taken_over = again(progress)
        assert [*progress.open] == [*taken_over.open] == open_offsets
        assert progress.low == taken_over.low == (open_offsets[0] if open_offsets else progress.next)
        assert progress.next == taken_over.next
        assert all(taken_over.is_waiting(each) for each in (*open_offsets, progress.next, offset))
        assert not any(taken_over.is_waiting(each) for each in ended)
        assert len(progress.note()) <= MAX_NOTE


@pytest.mark.parametrize("longest_gap", [1, 2, 60, 127, 128, 16_383, 16_384, 40_000])
def test_a_note_always_fits_as_long_as_room_is_asked_for(longest_gap: int) -> None:
    """D6: what would not fit is not begun."""
    random, offset, progress = Random(longest_gap), 10**9, Progress(10**9)
    open_offsets: list[int] = []
    for round_number in range(8):
        while progress.has_room_for(offset):
            assert progress.begin(offset)
            open_offsets.append(offset)
            offset += random.randint(1, longest_gap)
        assert len(progress.note()) <= MAX_NOTE
        for _ in range(len(open_offsets) * round_number // 8 + 1):
            # Only what lies at the front makes room, sooner or later.
            progress.end(open_offsets.pop(random.randrange(len(open_offsets)) if random.random() < 0.8 else 0))
        assert len(progress.note()) <= MAX_NOTE
        taken_over = again(progress)
        assert [*taken_over.open] == open_offsets
        # Those that were begun before need no room of their own.
        assert all(taken_over.has_room_for(each) for each in open_offsets)


def test_few_open_records_may_lie_far_apart_and_many_must_lie_close() -> None:
    few = begun(*(each * 1_000 for each in range(FEW_OPEN - 1)))
    assert few.has_room_for(10**9)
    many = begun(*range(FEW_OPEN))
    assert many.has_room_for(SHORT_SPAN - 1)
    assert not many.has_room_for(SHORT_SPAN)
    many.end(0)
    assert many.has_room_for(SHORT_SPAN)
    full = begun(*range(SHORT_SPAN))
    assert not full.has_room_for(full.next)
    assert len(full.note()) <= MAX_NOTE


def test_the_longest_note_of_steps_fits() -> None:
    """As many open records as a bitmap would not be chosen for, and as many wide gaps as there is room for."""
    close = range(2_812)
    progress = begun(*close, *range(close[-1] + 128, SHORT_SPAN, 128), SHORT_SPAN - 1)
    assert 8 * len(progress.open) <= SHORT_SPAN
    assert MAX_NOTE - 200 < len(progress.note()) <= MAX_NOTE
    assert [*again(progress).open] == [*progress.open]


def test_a_group_that_has_committed_nothing_begins_with_the_first_record_there_is() -> None:
    nothing = SimpleNamespace(topic="inbox", partition=3, offset=-1001, metadata=None)
    assert progress_of(nothing, {("inbox", 3): 42}).low == 42


@pytest.mark.parametrize("metadata", ["", None])
def test_a_group_without_a_note_goes_on_with_its_offset(metadata: str | None) -> None:
    """An operator may have moved it with Kafka's own tools, which write no note."""
    committed = SimpleNamespace(topic="inbox", partition=3, offset=17, metadata=metadata)
    progress = progress_of(committed, {})
    assert (progress.low, progress.next, [*progress.open]) == (17, 17, [])


def test_a_note_is_read_with_its_offset() -> None:
    before = begun(7, 8, 9, done={8})
    committed = SimpleNamespace(topic="inbox", partition=0, offset=before.low, metadata=before.note())
    assert [*progress_of(committed, {}).open] == [7, 9]


@pytest.mark.parametrize(
    ("offset", "noted_id", "topic_id", "end", "low"),
    [
        (5, "A", "A", 9, 5),
        (5, "A", "B", 9, 0),
        (5, "", "B", 9, 5),
        (5, "", "B", 3, 0),
        (5, "A", "A", 3, 3),
        (5, "", "", 9, 5),
    ],
)
def test_progress_of_a_topic_that_was_created_again_begins_with_its_first_record(
    offset: int, noted_id: str, topic_id: str, end: int, low: int
) -> None:
    """D18: the topic id shows it; without an id, an offset beyond the end does."""
    known = Progress(offset)
    committed = SimpleNamespace(topic="inbox", partition=3, offset=offset, metadata=note_of(known, noted_id))
    assert progress_of(committed, {("inbox", 3): 0}, ends={("inbox", 3): end}, topic_id=topic_id).low == low


def test_the_note_names_the_service_that_keeps_the_messages():
    progress = Progress(5)
    progress.begin(5)
    progress.begin(7)
    progress.end(5)
    for topic_id in ("", "abc"):
        for service in ("", "spark:1@/checkpoint"):
            note = note_of(progress, topic_id, service=service)
            committed = SimpleNamespace(topic="t", partition=0, offset=progress.low, metadata=note)
            assert service_of(committed) == service
            again = progress_of(committed, {("t", 0): 0}, topic_id=topic_id)
            assert (again.low, again.next, list(again.open)) == (7, 8, [7])
