from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.journal_wire import Answer, read_entries, write_answer, write_entry
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.journal import JournalEntry
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import Message

AT_MS = 1_900_000_000_000
MESSAGE = Message(id="m1", channel="orders", payload=b"\x00x", deliver_at=from_ms(AT_MS + 5), headers={"a": "b"})

texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)
printable = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(str.isprintable)
times_ms = st.integers(-(10**12), 4 * 10**12)
entries = st.builds(
    JournalEntry,
    message_id=printable,
    change=st.sampled_from(Change),
    at=times_ms.map(from_ms),
    channel=printable,
    deliver_at=times_ms.map(from_ms),
    position=st.just("here"),
    reason=st.none() | texts.filter(bool),
)


def write(entry: JournalEntry) -> bytes:
    return write_entry(
        entry.change,
        at_ms=round(entry.at.timestamp() * 1000),
        deliver_at_ms=round(entry.deliver_at.timestamp() * 1000),
        message_id=entry.message_id.encode(),
        channel=entry.channel,
        reason=entry.reason,
    )


@given(st.lists(entries | st.builds(Answer, printable, st.booleans()), max_size=6))
def test_all_entries_of_a_transaction_are_read_from_one_record(told: list[JournalEntry | Answer]) -> None:
    """D11, A45: in their order, none missing."""
    written = [
        write(each)
        if isinstance(each, JournalEntry)
        else write_answer(each.command_id, at_ms=AT_MS, obeyed=each.obeyed)
        for each in told
    ]
    read = [noted.answer or noted.entry("here") for noted in read_entries(b"".join(written))]
    assert read == told


def test_an_entry_carries_the_message_where_it_is_known() -> None:
    """B7"""
    entry = write_entry(
        Change.SCHEDULED,
        at_ms=AT_MS,
        deliver_at_ms=AT_MS + 5,
        message_id=b"m1",
        channel="orders",
        envelope=wire.write_envelope(MESSAGE, now_ms=AT_MS),
    )
    [noted] = read_entries(entry)
    assert noted.entry("p").message == MESSAGE


def test_an_answer_is_not_for_readers_of_the_journal() -> None:
    [obeyed, refused] = read_entries(
        write_answer("c1", at_ms=AT_MS, obeyed=True) + write_answer("c2", at_ms=AT_MS, obeyed=False)
    )
    assert (obeyed.change, refused.change) == (None, None)
    assert (obeyed.answer, refused.answer) == (Answer("c1", obeyed=True), Answer("c2", obeyed=False))


def test_an_entry_of_a_later_version_is_passed_over() -> None:
    known = write_answer("c1", at_ms=AT_MS, obeyed=True)
    unknown = (
        bytes([77])
        + write(
            JournalEntry(
                message_id="m1",
                change=Change.SCHEDULED,
                at=from_ms(0),
                channel="orders",
                deliver_at=from_ms(0),
                position="",
                reason="why",
            )
        )[1:]
    )
    [first, second, third] = read_entries(known + unknown + known)
    assert (second.change, second.answer) == (None, None)
    assert first == third


def test_an_empty_record_tells_nothing() -> None:
    assert [*read_entries(b"")] == []


@pytest.mark.parametrize("change", Change)
def test_every_change_can_be_told(change: Change) -> None:
    [noted] = read_entries(write_entry(change, at_ms=0, deliver_at_ms=0, message_id=b"m1", channel="orders"))
    assert noted.change is change


def test_a_long_reason_is_cut() -> None:
    [noted] = read_entries(
        write_entry(
            Change.DEAD_LETTERED, at_ms=0, deliver_at_ms=0, message_id=b"m1", channel="c", reason="ä\0" * 50_000
        )
    )
    assert noted.entry("p").reason == "ä" * (wire.MAX_REASON_LENGTH // 2)
