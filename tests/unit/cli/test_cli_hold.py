"""`--hold`: who holds messages for another broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.commandline import CommandLine
from tests.unit.elsewhere import define_elsewhere

FAR = ("--conn-id", "far", "--hold", "ledger")


@pytest.fixture
def far(delay: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """`airflow delay` with the connection ``far`` of another broker, which holds messages itself."""
    define_elsewhere(monkeypatch, tmp_path)
    return delay


def test_messages_held_by_the_ledger_are_scheduled_and_changed(far: CommandLine) -> None:
    """A5, A20, A27"""
    for name in ("m1", "m2", "m3"):
        far.document("schedule", "orders", "--payload", "x", "--after", "3600", "--id", name, *FAR)
    far.document("cancel", "m1", *FAR)
    far.document("reschedule", "m2", "--after", "60", *FAR)
    far.document("expedite", "m3", *FAR)
    shown = [far.document("show", name)["history"][-1]["change"] for name in ("m1", "m2", "m3")]
    assert shown == ["cancelled", "rescheduled", "expedited"]
    assert far.document("send", "orders", "--payload", "x", *FAR)["outcome"] == "dispatched"
    assert far.counts() == {"SCHEDULED": 2, "DISPATCHED": 1, "CANCELLED": 1, "DEAD": 0}


def test_a_file_is_held_by_the_ledger(far: CommandLine, tmp_path: Path) -> None:
    """A5"""
    file = tmp_path / "orders.jsonl"
    file.write_text('{"payload": "a"}\n{"payload": "b"}\n')
    assert far.document("schedule", "orders", "--file", str(file), "--after", "60", *FAR)["scheduled"] == 2
    assert far.counts()["SCHEDULED"] == 2


def test_without_the_option_the_connection_decides(far: CommandLine) -> None:
    """A5"""
    far.document("schedule", "orders", "--payload", "x", "--after", "60", "--conn-id", "far")
    assert far.counts()["SCHEDULED"] == 0


def test_embedded_messages_cannot_be_held_elsewhere(delay: CommandLine) -> None:
    result = delay("schedule", "orders", "--payload", "x", "--hold", "broker")
    assert (result.code, result.err.startswith("hold: ")) == (3, True)
    assert 'use hold="ledger", leave hold out' in result.err


@pytest.mark.parametrize("command", ["schedule c", "send c", "cancel m", "reschedule m", "expedite m"])
def test_another_hold_is_refused_with_the_choices(delay: CommandLine, command: str) -> None:
    result = delay(*command.split(), "--hold", "redis")
    assert result.code == 2
    assert "broker" in result.err
    assert "ledger" in result.err
