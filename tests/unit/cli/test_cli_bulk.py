"""`airflow delay schedule --file`: many messages from JSON lines or CSV."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.cli import bulk, output
from airflow_delay_provider.domain.clock import EPOCH
from airflow_delay_provider.domain.exceptions import LedgerError
from airflow_delay_provider.domain.message import Message
from tests.unit.cli.commandline import CommandLine

FAR = "2035-01-31T17:00:00Z"


def write_lines(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_json_line_becomes_a_message(delay: CommandLine, tmp_path: Path) -> None:
    """B59, D16: bulk, with every field a message has."""
    full = {
        "channel": "invoices",
        "payload": {"n": 1},
        "deliver_at": FAR,
        "message_id": "m1",
        "key": "k",
        "headers": {"a": "1"},
        "content_type": "application/x-n",
        "priority": 3,
    }
    binary = {"payload_base64": "/w==", "deliver_after": 3600, "message_id": "m2"}
    file = write_lines(tmp_path / "f.jsonl", [full, "", binary, {"payload": "due", "key": None}])
    done = delay.document("schedule", "orders", "--file", file)
    assert done == {"file": file, "messages": 3, "scheduled": 2, "dispatched": 1, "kept": 0, "replaced": 0}
    shown = delay.document("show", "m1", "--payload")
    assert {name: shown[name] for name in full if name not in ("payload", "deliver_at")} == {
        name: full[name] for name in full if name not in ("payload", "deliver_at")
    }
    assert shown["payload"] == '{"n":1}'
    other = delay.document("show", "m2", "--payload")
    assert (other["channel"], other["payload_base64"]) == ("orders", "/w==")


def test_each_csv_row_becomes_a_message(delay: CommandLine, tmp_path: Path) -> None:
    """An empty cell means: not given. A payload may hold commas, quotes and line breaks."""
    file = tmp_path / "f.csv"
    file.write_bytes(
        b"\xef\xbb\xbfmessage_id,payload,deliver_at,deliver_after,headers,priority,channel\r\n"
        b'm1,"two\nlines, ""quoted""",2035-01-31T17:00:00Z,,"{""a"": ""1""}",9,\r\n'
        b"m2,,,60,,,invoices\r\n"
        b"\r\n"
    )
    assert delay.document("schedule", "orders", "--file", str(file))["scheduled"] == 2
    shown = delay.document("show", "m1", "--payload")
    assert (shown["payload"], shown["headers"], shown["priority"]) == ('two\nlines, "quoted"', {"a": "1"}, 9)
    other = delay.document("show", "m2", "--payload")
    assert (other["channel"], other["payload"], other["priority"]) == ("invoices", "", 0)


def test_options_apply_to_lines_without_their_own_value(delay: CommandLine, tmp_path: Path) -> None:
    rows = [
        {"message_id": "m1", "payload": "x"},
        {
            "message_id": "m2",
            "payload": "x",
            "deliver_at": "2036-01-01T00:00:00Z",
            "key": "own",
            "priority": 1,
            "headers": {"b": "own"},
        },
    ]
    file = write_lines(tmp_path / "f.jsonl", rows)
    options = ["--at", FAR, "--key", "k", "--priority", "5", "--header", "a=1", "--header", "b=2"]
    delay.document("schedule", "orders", "--file", file, *options)
    first, second = delay.document("show", "m1"), delay.document("show", "m2")
    assert (first["key"], first["priority"], first["headers"]) == ("k", 5, {"a": "1", "b": "2"})
    assert first["deliver_at"] == "2035-01-31T17:00:00.000Z"
    assert (second["key"], second["priority"], second["headers"]) == ("own", 1, {"a": "1", "b": "own"})
    assert second["deliver_at"] == "2036-01-01T00:00:00.000Z"


def test_the_same_file_again_schedules_nothing_twice(delay: CommandLine, tmp_path: Path) -> None:
    """Lines without an id get one from the file's content, their number and the channel."""
    rows = [{"payload": "same", "deliver_at": FAR}] * 3
    file = write_lines(tmp_path / "f.jsonl", rows)
    assert delay.document("schedule", "orders", "--file", file)["scheduled"] == 3
    copy = write_lines(tmp_path / "copy.jsonl", rows)
    assert delay.document("schedule", "orders", "--file", copy)["kept"] == 3
    assert delay.document("schedule", "elsewhere", "--file", file)["scheduled"] == 3
    changed = write_lines(tmp_path / "f.jsonl", [*rows, rows[0]])
    assert delay.document("schedule", "orders", "--file", changed)["scheduled"] == 4


GOOD = '{"payload": "x", "deliver_at": "2035-01-31T17:00:00Z"}'
BAD_LINES = [
    ("{", "line: not JSON (", "write one JSON object per line"),
    ("[1]", "line: list is not an object", "write one JSON object per line"),
    ('{"payload": "x", "delivery": 5}', "line: 'delivery' is not a field of a message", "use channel, payload"),
    ("{}", "payload: missing", "give either payload or payload_base64"),
    ('{"payload": "x", "payload_base64": "eA=="}', "payload: given twice", "give either"),
    ('{"payload_base64": "?"}', "payload_base64: not base64", "encode the bytes"),
    ('{"payload": NaN}', "payload: float cannot be written as JSON", "pass bytes, str or plain JSON data"),
    ('{"payload": "\\ud800"}', "payload: str cannot be written as UTF-8", "pass bytes"),
    ('{"payload": "x", "deliver_at": "2035-01-31T17:00:00"}', "deliver_at: ", "has no time zone; add one"),
    ('{"payload": "x", "deliver_at": 5}', "deliver_at: 5 has the wrong type", "use text"),
    ('{"payload": "x", "deliver_after": true}', "deliver_after: true has the wrong type", "use a number or text"),
    ('{"payload": "x", "deliver_at": "2035-01-31T17:00:00Z", "deliver_after": 5}', "deliver_at: ", "give only one"),
    ('{"payload": "x", "deliver_at": "2001-01-01T00:00:00Z"}', "deliver_at: ", "has passed; choose a later time"),
    ('{"payload": "x", "deliver_at": "9000-01-01T00:00:00Z"}', "deliver_at: ", "choose an earlier time"),
    ('{"payload": "x", "channel": "a b"}', "channel: 'a b' is not a valid channel name", "use 1-255 letters"),
    ('{"payload": "x", "message_id": ""}', "message_id: ", "use 1-255 printable characters"),
    ('{"payload": "x", "message_id": 7}', "message_id: 7 has the wrong type", "use text"),
    ('{"payload": "x", "priority": 1.5}', "priority: 1.5 has the wrong type", "use a number or text"),
    ('{"payload": "x", "priority": 300}', "priority: 300 is out of range", "use 0 to 255"),
    ('{"payload": "x", "headers": {"a": 1}}', "headers: ", "is not text; use"),
    ('{"payload": "x", "key": "a\\u0000b"}', "key: ", "without NUL"),
]


@pytest.mark.parametrize(("line", "problem", "remedy"), BAD_LINES)
def test_a_bad_json_line_is_named_and_nothing_is_written(
    delay: CommandLine, tmp_path: Path, nothing_waits: Callable[[], None], line: str, problem: str, remedy: str
) -> None:
    """B3: file, line, field and remedy, code 2."""
    file = write_lines(tmp_path / "f.jsonl", [GOOD, "", GOOD, line, GOOD])
    result = delay("schedule", "orders", "--file", file, "--on-past", "fail")
    assert result.code == 2
    assert result.err.startswith(f"{file}, line 4: {problem}"), result.err
    assert remedy in result.err
    assert result.err.count("\n") == 1
    nothing_waits()


BAD_ROWS = [
    (b"payload,colour\nx,red\n", 1, "line: 'colour' is not a field of a message; use channel, payload"),
    (b"payload,payload\nx,y\n", 1, "line: a column name occurs twice; give each column its own name"),
    (b'payload,key\n"a\nb",k\nx,k,more\n', 4, "line: 3 cells for 2 columns; "),
    (b'payload,key\nx,k\n"never closed,k\n', 3, "line: not CSV (unexpected end of data); quote"),
    (b"payload,headers\nx,{}\nx,a=1\n", 3, "headers: not a JSON object; write them as"),
    (b"payload,deliver_at\nx,soon\n", 2, "deliver_at: 'soon' is not a time; use"),
    (b"payload\nx\n\xff\n", 3, "file: not UTF-8 (invalid start byte); save the file as UTF-8"),
    (b"key\nk\n", 2, "payload: missing; give either"),
]


@pytest.mark.parametrize(("content", "line", "problem"), BAD_ROWS)
def test_a_bad_csv_row_is_named_and_nothing_is_written(
    delay: CommandLine, tmp_path: Path, nothing_waits: Callable[[], None], content: bytes, line: int, problem: str
) -> None:
    file = tmp_path / "f.csv"
    file.write_bytes(content)
    result = delay("schedule", "orders", "--file", str(file))
    assert result.code == 2
    assert result.err.startswith(f"{file}, line {line}: {problem}"), result.err
    nothing_waits()


def test_a_bad_line_far_behind_is_found_before_anything_is_written(
    delay: CommandLine, tmp_path: Path, nothing_waits: Callable[[], None]
) -> None:
    file = write_lines(tmp_path / "f.jsonl", [*[GOOD] * 2500, "{}"])
    result = delay("schedule", "orders", "--file", file)
    assert (result.code, f"{file}, line 2501: payload: missing" in result.err) == (2, True)
    nothing_waits()


def test_a_duplicate_id_is_named_with_both_lines(
    delay: CommandLine, tmp_path: Path, nothing_waits: Callable[[], None]
) -> None:
    """Chunks apart, the second would silently be kept as the first."""
    same = {"payload": "x", "deliver_at": FAR, "message_id": "same"}
    file = write_lines(tmp_path / "f.jsonl", [GOOD, same, *[GOOD] * 1500, same])
    result = delay("schedule", "orders", "--file", file)
    assert result.code == 2
    assert "line 1503: message_id: 'same' is also in line 2; give each message its own id" in result.err
    nothing_waits()


def test_a_channel_is_required(delay: CommandLine, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [GOOD])
    result = delay("schedule", "--file", file)
    assert (result.code, "line 1: channel: missing; add it to the line" in result.err) == (2, True)


def test_the_limits_of_the_connection_hold_for_each_line(
    delay: CommandLine, define: Callable[..., str], tmp_path: Path, nothing_waits: Callable[[], None]
) -> None:
    """B4: too soon and too large are found in the first pass."""
    conn_id = define(min_delay=120, max_payload_bytes=4)
    for line, problem in [
        ({"payload": "x", "deliver_after": 60}, "line 2: deliver_at: "),
        ({"payload": "12345", "deliver_after": 600}, "line 2: payload: 5 bytes are more than max_payload_bytes (4)"),
    ]:
        file = write_lines(tmp_path / "f.jsonl", [GOOD, line])
        result = delay("schedule", "orders", "--file", file, "--conn-id", conn_id)
        assert (result.code, problem in result.err) == (2, True), result.err
    nothing_waits()


def test_an_endless_line_is_not_read_to_its_end(delay: CommandLine, define: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_bytes(b'{"payload": "' + b"x" * 3_000_000)
    result = delay("schedule", "orders", "--file", str(file), "--conn-id", define(max_payload_bytes=4))
    assert result.code == 2
    assert "line 1: payload: the line exceeds 1048600 bytes; send a reference" in result.err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.jsonl", "cannot be read (No such file or directory); name a file"),
        ("folder.csv", "is not a regular file; save it to disk first"),
        ("rows.xlsx", "is neither JSON Lines nor CSV; name it .jsonl, .ndjson or .csv"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(delay: CommandLine, tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "rows.xlsx").touch()
    result = delay("schedule", "orders", "--file", str(tmp_path / name))
    assert result.code == 2
    assert result.err.startswith(f"file: {tmp_path / name} {problem}")


@pytest.mark.parametrize("option", ["--payload", "--payload-file", "--id"])
def test_options_for_one_message_are_refused_with_a_file(delay: CommandLine, tmp_path: Path, option: str) -> None:
    file = write_lines(tmp_path / "f.jsonl", [GOOD])
    result = delay("schedule", "orders", "--file", file, option, "x")
    assert (result.code, result.err) == (
        2,
        f"file: cannot be combined with {option}; set it in each line of the file\n",
    )


def failing_from(monkeypatch: pytest.MonkeyPatch, *, call: int, error: BaseException) -> None:
    """Let the broker fail from its ``call``-th chunk on, as it does when the database goes down."""
    calls = 0
    schedule = EmbeddedBroker._schedule

    def fail(self: EmbeddedBroker, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise error
        return schedule(self, *args)

    monkeypatch.setattr(EmbeddedBroker, "_schedule", fail)


def test_an_outage_names_the_last_confirmed_line_and_repeating_continues(delay: CommandLine, tmp_path: Path) -> None:
    """B34, B36: nothing is lost and nothing comes twice."""
    file = write_lines(tmp_path / "f.jsonl", [GOOD] * 2500)
    with pytest.MonkeyPatch.context() as patch:
        failing_from(patch, call=3, error=LedgerError("the ledger did not confirm"))
        result = delay("schedule", "orders", "--file", file)
    assert result.code == 3
    assert result.err == (
        f"{file}: 2000 messages up to line 2000 are confirmed, then: the ledger did not confirm;"
        " repeat the command to continue\n"
    )
    assert delay.counts()["SCHEDULED"] == 2000
    done = delay.document("schedule", "orders", "--file", file)
    assert (done["kept"], done["scheduled"]) == (2000, 500)
    assert delay.counts()["SCHEDULED"] == 2500


def test_another_conflict_policy_is_advised_to_keep(delay: CommandLine, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [GOOD] * 1500)
    with pytest.MonkeyPatch.context() as patch:
        failing_from(patch, call=2, error=LedgerError("the ledger did not confirm"))
        result = delay("schedule", "orders", "--file", file, "--on-conflict", "fail")
    assert "repeat the command with --on-conflict keep to continue" in result.err


def test_ctrl_c_names_the_last_confirmed_line(delay: CommandLine, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [GOOD] * 1500)
    with pytest.MonkeyPatch.context() as patch:
        failing_from(patch, call=2, error=KeyboardInterrupt())
        result = delay("schedule", "orders", "--file", file)
    assert result.code == 130
    assert "1000 messages up to line 1000 are confirmed, then: interrupted" in result.err


def test_an_existing_id_can_fail(delay: CommandLine, tmp_path: Path) -> None:
    """B5: code 1, and the chunk is not written."""
    rows = [{"payload": "x", "deliver_at": FAR, "message_id": name} for name in ("m1", "m2")]
    file = write_lines(tmp_path / "f.jsonl", rows)
    delay.document("schedule", "orders", "--payload", "x", "--at", FAR, "--id", "m2")
    result = delay("schedule", "orders", "--file", file, "--on-conflict", "fail")
    assert result.code == 1
    assert f"{file}: no message is confirmed, then: message 'm2' already exists (SCHEDULED)" in result.err
    assert delay.counts()["SCHEDULED"] == 1


def test_memory_does_not_grow_with_the_file(delay: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    with file.open("w") as out:
        for number in range(6000):
            out.write(json.dumps({"payload": "x" * 8000, "deliver_at": FAR, "message_id": f"m{number}"}) + "\n")
    tracemalloc.start()
    try:
        assert delay.document("schedule", "orders", "--file", str(file))["scheduled"] == 6000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert file.stat().st_size > 48_000_000
    assert peak < 30_000_000


def test_large_messages_make_small_chunks() -> None:
    messages = [(n, Message(channel="c", payload=b"12345", deliver_at=EPOCH)) for n in range(7)]
    sizes = [len(chunk) for chunk in bulk.chunks(messages, most=3, most_bytes=100)]
    assert sizes == [3, 3, 1]
    assert [len(chunk) for chunk in bulk.chunks(messages, most=3, most_bytes=10)] == [2, 2, 2, 1]


def test_without_a_terminal_progress_is_a_line_now_and_then(
    delay: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "f.jsonl", [GOOD] * 1500)
    assert delay("schedule", "orders", "--file", file).err == ""
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    assert delay("schedule", "orders", "--file", file).err.splitlines() == [
        f"checking {file}: 1000 lines",
        f"scheduling {file}: 1000 of 1500 lines",
        f"scheduling {file}: 1500 of 1500 lines",
    ]


def test_on_a_terminal_progress_is_a_bar(delay: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    file = write_lines(tmp_path / "f.jsonl", [GOOD] * 3)
    result = delay("schedule", "orders", "--file", file, "--output", "json")
    assert "scheduling" in result.err
    assert "3/3" in result.err
    assert result.document["messages"] == 3
