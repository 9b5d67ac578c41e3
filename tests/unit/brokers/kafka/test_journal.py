from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka import wire
from airflow_delay_provider.brokers.kafka.journal import CommandResult, decode_entries, encode_entry, encode_result
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.lifecycle import Change, JournalEntry
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
    return encode_entry(
        entry.change,
        at_ms=round(entry.at.timestamp() * 1000),
        deliver_at_ms=round(entry.deliver_at.timestamp() * 1000),
        message_id=entry.message_id.encode(),
        channel=entry.channel,
        reason=entry.reason,
    )


@given(st.lists(entries | st.builds(CommandResult, printable, st.booleans()), max_size=6))
def test_all_entries_of_a_transaction_are_read_from_one_record(recorded: list[JournalEntry | CommandResult]) -> None:
    """D11, A45: in their order, none missing."""
    written = [
        write(each)
        if isinstance(each, JournalEntry)
        else encode_result(each.command_id, at_ms=AT_MS, accepted=each.accepted)
        for each in recorded
    ]
    read = [encoded.result or encoded.entry("here") for encoded in decode_entries(b"".join(written))]
    assert read == recorded


def test_an_entry_carries_the_message_where_it_is_known() -> None:
    """B7"""
    entry = encode_entry(
        Change.SCHEDULED,
        at_ms=AT_MS,
        deliver_at_ms=AT_MS + 5,
        message_id=b"m1",
        channel="orders",
        envelope=wire.encode_envelope(MESSAGE, now_ms=AT_MS),
    )
    [encoded] = decode_entries(entry)
    assert encoded.entry("p").message == MESSAGE


def test_an_answer_is_not_for_readers_of_the_journal() -> None:
    [accepted, refused] = decode_entries(
        encode_result("c1", at_ms=AT_MS, accepted=True) + encode_result("c2", at_ms=AT_MS, accepted=False)
    )
    assert (accepted.change, refused.change) == (None, None)
    assert (accepted.result, refused.result) == (
        CommandResult("c1", accepted=True),
        CommandResult("c2", accepted=False),
    )


def test_an_entry_of_a_later_version_is_passed_over() -> None:
    known = encode_result("c1", at_ms=AT_MS, accepted=True)
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
    [first, second, third] = decode_entries(known + unknown + known)
    assert (second.change, second.result) == (None, None)
    assert first == third


def test_an_empty_record_has_no_entries() -> None:
    assert [*decode_entries(b"")] == []


@pytest.mark.parametrize("change", Change)
def test_every_change_can_be_recorded(change: Change) -> None:
    [encoded] = decode_entries(encode_entry(change, at_ms=0, deliver_at_ms=0, message_id=b"m1", channel="orders"))
    assert encoded.change is change


def test_a_long_reason_is_cut() -> None:
    [encoded] = decode_entries(
        encode_entry(
            Change.DEAD_LETTERED, at_ms=0, deliver_at_ms=0, message_id=b"m1", channel="c", reason="ä\0" * 50_000
        )
    )
    assert encoded.entry("p").reason == "ä" * (protocol.MAX_REASON_LENGTH // 2)
