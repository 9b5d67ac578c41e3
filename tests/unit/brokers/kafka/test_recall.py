from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delay_provider.brokers.kafka.header_protocol import MAX_MS, MIN_MS
from airflow_delay_provider.brokers.kafka.recall import Command, RecordPosition
from airflow_delay_provider.domain.lifecycle import Change

ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(str.isprintable)
topics = st.from_regex(r"[A-Za-z0-9._-]{1,60}", fullmatch=True)
places = st.builds(RecordPosition, topic=topics, partition=st.integers(0, 999), offset=st.integers(0, 2**62))
commands = st.builds(
    Command,
    id=ids,
    change=st.sampled_from([Change.CANCELLED, Change.RESCHEDULED, Change.EXPEDITED]),
    message_id=ids,
    channel=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,60}", fullmatch=True),
    position=places,
    deliver_at_ms=st.integers(MIN_MS, MAX_MS),
    envelope=st.binary(max_size=60),
)


@given(commands)
def test_a_command_is_read_as_it_was_written(command: Command) -> None:
    """A27, E10: with the message it moves."""
    assert Command.decode(command.encode()) == command


@given(places)
def test_a_place_is_remembered_by_its_key(position: RecordPosition) -> None:
    assert RecordPosition.from_key(position.key(), position.partition) == position


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x00\x00\x00",
        b"\x00\x00\x00\x02{}",
        b"\x00\x00\x00\x02[]",
        b"\xff\xff\xff\xff{}",
        b'\x00\x00\x00\x09{"id": 1}',
        b"some words that somebody wrote",
    ],
)
def test_an_invalid_command_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="not a command"):
        Command.decode(value)


@given(st.binary(max_size=80), commands, st.integers(0, 200))
def test_damaged_commands_are_refused_or_read_and_nothing_else(noise: bytes, command: Command, cut: int) -> None:
    """B37"""
    for value in (noise, command.encode()[:cut]):
        with suppress(ValueError):
            assert Command.decode(value).encode()
