"""`airflow delay replay`."""

from __future__ import annotations

import io

import pytest

from tests.unit.cli.commandline import CommandLine


@pytest.fixture
def dead(delay: CommandLine) -> CommandLine:
    """Three messages that a consumer has dead-lettered."""
    for name in ("m1", "m2", "m3"):
        delay.document("schedule", "orders", "--payload", name, "--id", name)
    assert delay("consume", "orders", "--exec", "false", "--limit", "3").code == 0
    assert delay.counts()["DEAD"] == 3
    return delay


def test_dead_messages_are_counted_and_replayed(dead: CommandLine) -> None:
    """A25"""
    assert dead.document("replay", "--channel", "orders", "--dry-run") == {"would_replay": 3, "is_exact": True}
    assert dead.counts()["DEAD"] == 3
    done = dead.document("replay", "--channel", "orders", "--yes")
    assert done == {"replayed": 3, "not_dead": [], "is_complete": True}
    assert dead.counts()["SCHEDULED"] == 3
    assert dead.document("show", "m1")["history"][-1]["reason"] == "replayed"


def test_ids_need_no_confirmation_and_one_that_is_not_dead_is_named(dead: CommandLine) -> None:
    """B13: code 1, and those that are dead are replayed."""
    result = dead("replay", "m1", "nobody", "-o", "json")
    assert (result.code, result.document["replayed"], result.document["not_dead"]) == (1, 1, ["nobody"])
    assert dead.counts()["SCHEDULED"] == 1


def test_without_a_terminal_many_are_replayed_only_with_yes(dead: CommandLine) -> None:
    result = dead("replay", "--reason", "exited with 1")
    assert result.code == 2
    assert result.err.startswith("This replays 3 messages. Pass --yes to confirm.")
    assert dead.counts()["DEAD"] == 3


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 3), ("", 3)])
def test_a_terminal_asks_for_confirmation(
    dead: CommandLine, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    result = dead("replay", "--channel", "orders")
    assert "Replay 3 messages? [y/N]" in result.err
    assert dead.counts()["DEAD"] == left


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "replay: no messages are selected; give ids, a channel, a DAG, a reason or a time"),
        (["--since", "yesterday"], "since: 'yesterday' is not a time"),
        (["--until", "2030-01-01T00:00:00"], "until: 2030-01-01T00:00:00 has no time zone"),
        (["--channel", "a b"], "channel: 'a b' is not a valid channel name"),
    ],
)
def test_an_invalid_selection_is_refused(dead: CommandLine, words: list[str], sentence: str) -> None:
    """B13: code 2."""
    result = dead("replay", *words)
    assert result.code == 2
    assert sentence in result.err
