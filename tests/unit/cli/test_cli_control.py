"""`airflow delay cancel`, `reschedule` and `expedite`."""

from __future__ import annotations

import pytest

from tests.unit.cli.commandline import CommandLine

FAR = "2035-01-31T17:00:00Z"


@pytest.fixture
def two(delay: CommandLine) -> CommandLine:
    """Two waiting messages."""
    for name in ("m1", "m2"):
        delay.document("schedule", "orders", "--payload", "x", "--at", FAR, "--id", name)
    return delay


def test_messages_are_cancelled_together(two: CommandLine) -> None:
    """B56, A27."""
    done = two.document("cancel", "m1", "m2")
    assert done == {"change": "cancelled", "message_ids": ["m1", "m2"], "deliver_at": None}
    assert two.counts()["CANCELLED"] == 2
    assert two("cancel", "m1").code == 0


def test_messages_are_rescheduled_to_a_time_or_by_a_delay(two: CommandLine) -> None:
    """B59."""
    done = two.document("reschedule", "m1", "--at", "2036-01-01T00:00:00+01:00")
    assert done["deliver_at"] == "2035-12-31T23:00:00.000Z"
    assert two.document("show", "m1")["deliver_at"] == "2035-12-31T23:00:00.000Z"
    two.document("reschedule", "m2", "--after", "60")
    assert two.document("list")["messages"][0]["message_id"] == "m2"


def test_expedited_messages_are_due_now(two: CommandLine) -> None:
    two.document("expedite", "m1", "m2")
    assert two.document("status")["overdue_seconds"] >= 0
    assert "expedited" in two("show", "m2").out


@pytest.mark.parametrize("words", [["cancel"], ["expedite"], ["reschedule", "--after", "5"]])
def test_one_unknown_id_changes_none_of_them(two: CommandLine, words: list[str]) -> None:
    """B13: all or none, code 1."""
    command, *options = words
    result = two(command, "m1", "nobody", *options)
    assert result.code == 1
    assert result.err.startswith("message 'nobody' is not known; `airflow delay list` shows")
    assert [entry["change"] for entry in two.document("show", "m1")["history"]] == ["scheduled"]


@pytest.mark.parametrize("words", [["cancel"], ["expedite"], ["reschedule", "--after", "5"]])
def test_a_dispatched_message_can_no_longer_be_changed(delay: CommandLine, words: list[str]) -> None:
    """B22: code 1."""
    delay.document("send", "orders", "--payload", "x", "--id", "m1")
    command, *options = words
    result = delay(command, "m1", *options)
    assert result.code == 1
    assert "only a scheduled message can" in result.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--at (deliver_at): missing; give --at or --after; to deliver now, use `airflow delay expedite`"),
        (["--at", FAR, "--after", "5"], "--at (deliver_at): deliver_after is given, too; give only one"),
        (["--at", "2035-01-31T17:00:00"], "--at (deliver_at): 2035-01-31T17:00:00 has no time zone; add one"),
        (["--at", "9000-01-01T00:00:00Z"], "--at (deliver_at): 9000-01-01T00:00:00+00:00 is more than max_delay"),
        (["--after", "-5", "--on-past", "fail"], "--after (deliver_after): "),
    ],
)
def test_a_bad_time_is_refused_and_changes_nothing(two: CommandLine, words: list[str], problem: str) -> None:
    """B3, A30."""
    result = two("reschedule", "m1", *words)
    assert result.code == 2
    assert result.err.startswith(problem)
    assert two.document("show", "m1")["deliver_at"] == "2035-01-31T17:00:00.000Z"


def test_the_table_names_each_message(two: CommandLine) -> None:
    result = two("cancel", "m1", "m2")
    assert [line.split()[0] for line in result.out.splitlines()[2:]] == ["m1", "m2"]
