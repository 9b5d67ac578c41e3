"""`airflow delay schedule` and `send`: one message."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.unit.cli.commandline import CommandLine

FAR = "2035-01-31T17:00:00Z"


def test_a_message_is_stored_as_it_was_given(delay: CommandLine) -> None:
    """B7, B8, B12, B16: payload, content type, priority, headers and id are kept as they are."""
    options = [
        "--key",
        "k1",
        "--header",
        "a=1",
        "--header",
        "b=x=y",
        "--content-type",
        "application/json",
        "--priority",
        "7",
        "--id",
        "m1",
    ]
    receipt = delay.document("schedule", "orders", "--payload", '{"n": 1}', "--at", FAR, *options)
    assert receipt == {
        "message_id": "m1",
        "channel": "orders",
        "outcome": "scheduled",
        "deliver_at": "2035-01-31T17:00:00.000Z",
    }
    shown = delay.document("show", "m1", "--payload")
    assert shown["payload"] == '{"n": 1}'
    assert shown["headers"] == {"a": "1", "b": "x=y"}
    assert (shown["key"], shown["content_type"], shown["priority"]) == ("k1", "application/json", 7)
    assert (shown["state"], shown["state_code"], shown["dispatched_at"]) == ("SCHEDULED", 100, None)


def test_a_delay_counts_from_now(delay: CommandLine) -> None:
    """D1, B59: a message can be due after a delay as well as at a time."""
    before = datetime.now(UTC)
    receipt = delay.document("schedule", "orders", "--payload", "x", "--after", "3600")
    due = datetime.fromisoformat(receipt["deliver_at"])
    assert timedelta(seconds=3600) <= due - before < timedelta(seconds=3660)


def test_a_time_in_another_zone_is_printed_in_utc(delay: CommandLine) -> None:
    """B21."""
    receipt = delay.document("schedule", "orders", "--payload", "x", "--at", "2035-01-31T18:00:00+01:00")
    assert receipt["deliver_at"] == "2035-01-31T17:00:00.000Z"


@pytest.mark.parametrize("when", [(), ("--after", "0"), ("--after", "-5"), ("--at", "2001-01-01T00:00:00Z")])
def test_a_message_that_is_due_goes_straight_to_its_channel(delay: CommandLine, when: tuple[str, ...]) -> None:
    """A10, B58."""
    assert delay.document("schedule", "orders", "--payload", "x", *when)["outcome"] == "dispatched"
    assert delay("consume", "orders", "--limit", "1", "--timeout", "5").lines[0]["payload"] == "x"


def test_send_puts_the_message_into_its_channel_now(delay: CommandLine) -> None:
    sent = delay.document("send", "orders", "--payload", "x", "--id", "m1", "--header", "a=1")
    assert sent["outcome"] == "dispatched"
    (received,) = delay("consume", "orders", "--limit", "1").lines
    assert (received["message_id"], received["payload"], received["headers"]) == ("m1", "x", {"a": "1"})
    assert delay.document("send", "orders", "--payload", "x", "--id", "m1")["outcome"] == "kept"


def test_the_bytes_of_a_file_arrive_unchanged(delay: CommandLine, tmp_path: Path) -> None:
    data = bytes(range(256))
    (tmp_path / "data").write_bytes(data)
    delay.document("schedule", "orders", "--payload-file", str(tmp_path / "data"), "--at", FAR, "--id", "m1")
    assert base64.b64decode(delay.document("show", "m1", "--payload")["payload_base64"]) == data


def test_the_same_id_again_is_kept_by_default(delay: CommandLine) -> None:
    """B6: the first message stays, and the answer says so."""
    delay.document("schedule", "orders", "--payload", "first", "--at", FAR, "--id", "m1")
    again = delay.document("schedule", "orders", "--payload", "second", "--at", FAR, "--id", "m1")
    assert (again["outcome"], again["deliver_at"]) == ("kept", None)
    assert delay.document("show", "m1", "--payload")["payload"] == "first"


def test_the_same_id_again_can_fail(delay: CommandLine) -> None:
    """B5, A28: code 1, and the first message stays."""
    delay.document("schedule", "orders", "--payload", "first", "--at", FAR, "--id", "m1")
    again = delay("schedule", "orders", "--payload", "2", "--at", FAR, "--id", "m1", "--on-conflict", "fail")
    assert again.code == 1
    assert again.err.startswith("message 'm1' already exists (SCHEDULED); use another message_id")
    assert delay.document("show", "m1", "--payload")["payload"] == "first"


def test_the_same_id_again_can_replace(delay: CommandLine) -> None:
    """A28: the waiting message takes the new content and time."""
    delay.document("schedule", "orders", "--payload", "first", "--at", FAR, "--id", "m1")
    again = delay.document(
        "schedule", "orders", "--payload", "2", "--at", "2036-01-01T00:00:00Z", "--id", "m1", "--on-conflict", "replace"
    )
    assert again["outcome"] == "replaced"
    shown = delay.document("show", "m1", "--payload")
    assert (shown["payload"], shown["deliver_at"]) == ("2", "2036-01-01T00:00:00.000Z")


BAD_INPUT = [
    (["orders", "--payload", "x", "--at", "2035-01-31T17:00:00"], "--at (deliver_at): ", "has no time zone; add one"),
    (["orders", "--payload", "x", "--at", "tomorrow"], "--at (deliver_at): ", "is not a time; use"),
    (["orders", "--payload", "x", "--at", FAR, "--after", "5"], "--at (deliver_at): ", "give only one of them"),
    (["orders", "--payload", "x", "--after", "soon"], "--after (deliver_after): ", "is not a delay; use"),
    (["orders", "--payload", "x", "--after", "nan"], "--after (deliver_after): ", "is not a delay; use"),
    (["orders", "--payload", "x", "--after", "1e300"], "--after (deliver_after): ", ";"),
    (
        ["orders", "--payload", "x", "--at", "2001-01-01T00:00:00Z", "--on-past", "fail"],
        "--at (deliver_at): ",
        "has passed",
    ),
    (["orders", "--payload", "x", "--at", "9000-01-01T00:00:00Z"], "--at (deliver_at): ", "max_delay"),
    (["orders", "--payload", "x", "--at", "9999-12-31T23:59:59-14:00"], "--at (deliver_at): ", "is out of range"),
    (["no spaces", "--payload", "x"], "channel: ", "is not a valid channel name; use 1-255 letters"),
    (["", "--payload", "x"], "channel: ", "is not a valid channel name; use 1-255 letters"),
    (["--payload", "x"], "channel: ", "missing; name it"),
    (["orders"], "payload: ", "missing; give either --payload or --payload-file"),
    (["orders", "--payload", "x", "--payload-file", "y"], "payload: ", "give either"),
    (["orders", "--payload-file", "/nowhere/at/all"], "payload: ", "cannot be read (No such file"),
    (["orders", "--payload", "x" * 1_048_577], "payload: ", "1048577 bytes are more than max_payload_bytes (1048576)"),
    (["orders", "--payload", "\udcff"], "payload: ", "cannot be written as UTF-8"),
    (["orders", "--payload", "x", "--header", "novalue"], "--header (headers): ", "use NAME=VALUE"),
    (["orders", "--payload", "x", "--header", "a=1", "--header", "a=2"], "--header (headers): ", "given twice"),
    (["orders", "--payload", "x", "--priority", "high"], "priority: ", "use 0 to 255"),
    (["orders", "--payload", "x", "--priority", "256"], "priority: ", "use 0 to 255"),
    (["orders", "--payload", "x", "--id", ""], "--id (message_id): ", "use 1-255 printable characters"),
    (["orders", "--payload", "x", "--id", "a\nb"], "--id (message_id): ", "use 1-255 printable characters"),
]


@pytest.mark.parametrize(("words", "field", "remedy"), BAD_INPUT)
def test_bad_input_is_named_with_its_remedy_and_changes_nothing(
    delay: CommandLine, nothing_waits: Callable[[], None], words: list[str], field: str, remedy: str
) -> None:
    """B3, A30: code 2 and one sentence."""
    result = delay("schedule", *words)
    assert result.code == 2
    assert result.err.startswith(field)
    assert remedy in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""
    nothing_waits()


@pytest.mark.parametrize("option", ["--on-past", "--on-conflict", "--output"])
def test_an_unknown_choice_is_refused(delay: CommandLine, nothing_waits: Callable[[], None], option: str) -> None:
    result = delay("schedule", "orders", "--payload", "x", option, "maybe")
    assert result.code == 2
    assert f"{option}: invalid choice: 'maybe'" in result.err
    nothing_waits()


def test_the_limits_of_the_connection_hold(
    delay: CommandLine, define: Callable[..., str], tmp_path: Path, nothing_waits: Callable[[], None]
) -> None:
    """B4, B25: too soon, too far and too large by the connection's own limits."""
    conn_id = define(min_delay=120, max_delay=3600, max_payload_bytes=4)
    (tmp_path / "large").write_bytes(b"12345")
    for words, problem in [
        (("--payload", "x", "--after", "60"), r"--at \(deliver_at\): .* less than min_delay"),
        (("--payload", "x", "--after", "7200"), r"--at \(deliver_at\): .* more than max_delay"),
        (("--payload", "12345", "--after", "600"), "payload: 5 bytes are more than max_payload_bytes"),
        (("--payload-file", str(tmp_path / "large"), "--after", "600"), "payload: .* larger than max_payload_bytes"),
    ]:
        result = delay("schedule", "orders", *words, "--conn-id", conn_id)
        assert result.code == 2
        assert re.match(problem, result.err), result.err
    nothing_waits()
    assert delay.document("schedule", "orders", "--payload", "1234", "--after", "600", "--conn-id", conn_id)


def test_an_unknown_connection_is_code_3(delay: CommandLine, nothing_waits: Callable[[], None]) -> None:
    """A12: the sentence says how to define it."""
    result = delay("schedule", "orders", "--payload", "x", "--conn-id", "nowhere")
    assert result.code == 3
    assert result.err.startswith("--conn-id (delay_conn_id): connection 'nowhere' is not defined; create it with")
    nothing_waits()


def test_a_database_that_is_down_is_code_3(
    delay: CommandLine, define: Callable[..., str], closed_port: int, nothing_waits: Callable[[], None]
) -> None:
    """B34: one sentence, no traceback."""
    conn_id = define(host="127.0.0.1", port=closed_port)
    for words in (
        ["schedule", "orders", "--payload", "x"],
        ["send", "orders", "--payload", "x"],
        ["list"],
        ["show", "m1"],
        ["status"],
        ["cancel", "m1"],
        ["consume", "orders"],
        ["db", "check"],
        ["dispatcher", "--health-port", "-1"],
    ):
        result = delay(*words, "--conn-id", conn_id)
        assert result.code == 3, words
        assert result.err.count("\n") == 1, result.err
        assert f"127.0.0.1:{closed_port}" in result.err
    nothing_waits()


def test_a_password_is_never_printed(delay: CommandLine, monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    url = f"postgresql://delay:very-secret@127.0.0.1:{closed_port}/delay"
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", url)
    result = delay("status")
    assert result.code == 3
    assert "very-secret" not in result.out + result.err


def test_new_messages_are_counted_in_airflows_metrics(
    delay: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """B38, B65: by channel; kept messages are not new."""
    counted: list[tuple[int, str | None]] = []

    def scheduled(self: object, count: int, *, channel: str | None = None) -> None:
        counted.append((count, channel))

    monkeypatch.setattr("airflow_delay_provider.metrics.AirflowMetrics.scheduled", scheduled)
    file = tmp_path / "f.jsonl"
    file.write_text('{"payload": "x", "channel": "a"}\n{"payload": "y", "channel": "a"}\n{"payload": "z"}\n')
    for _ in range(2):
        delay.document("schedule", "b", "--file", str(file))
        delay.document("schedule", "orders", "--payload", "x", "--at", FAR, "--id", "m1")
        delay.document("send", "orders", "--payload", "x", "--id", "m2")
    assert counted == [(2, "a"), (1, "b"), (1, "orders"), (1, "orders")]
