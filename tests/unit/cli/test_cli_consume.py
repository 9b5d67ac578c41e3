"""`airflow delay consume`: printing, and handing to a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.brokers.consumer import Consumed, Consumer
from airflow_delay_provider.cli import consume
from tests.unit.cli.commandline import CommandLine


@pytest.fixture
def one(delay: CommandLine) -> CommandLine:
    """A channel with one message."""
    options = ["--id", "m1", "--header", "a=1", "--key", "k", "--priority", "4", "--content-type", "text/x"]
    delay.document("send", "orders", "--payload", "hello", *options)
    return delay


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a Python program and returns the command that runs it."""

    def write(code: str) -> str:
        path = tmp_path / "handler.py"
        path.write_text(code)
        return f"{sys.executable} -S {path}"

    return write


def state_of(delay: CommandLine, message_id: str = "m1") -> str:
    state: str = delay.document("show", message_id)["state"]
    return state


def test_each_message_is_a_json_line_and_is_taken_once(one: CommandLine) -> None:
    one.document("send", "orders", "--payload", "two", "--id", "m2")
    result = one("consume", "orders", "--limit", "2", "--timeout", "5")
    assert result.code == 0
    first, second = result.lines
    assert (first["message_id"], second["message_id"]) == ("m1", "m2")
    assert (first["payload"], first["headers"], first["key"]) == ("hello", {"a": "1"}, "k")
    assert (first["priority"], first["content_type"], first["handled_count"]) == (4, "text/x", 0)
    assert result.err == "handled 2, deferred 0, dead-lettered 0\n"
    assert one("consume", "orders", "--timeout", "0").out == ""


def test_messages_can_be_printed_for_people(one: CommandLine) -> None:
    assert one("consume", "orders", "--limit", "1", "--output", "table").out.endswith("Z  m1  hello\n")


def test_a_command_gets_the_payload_and_the_message_in_its_environment(
    one: CommandLine, script: Callable[[str], str], tmp_path: Path
) -> None:
    """Code 0 takes the message."""
    answer = tmp_path / "answer.json"
    command = script(
        "import json, os, sys\n"
        "seen = {k: v for k, v in os.environ.items() if k.startswith('DELAY_') and 'TEST' not in k}\n"
        f"open({str(answer)!r}, 'w').write(json.dumps([sys.stdin.read(), seen]))\n"
    )
    result = one("consume", "orders", "--limit", "1", "--timeout", "20", "--exec", command)
    assert (result.code, result.err) == (0, "handled 1, deferred 0, dead-lettered 0\n")
    payload, seen = json.loads(answer.read_text())
    assert payload == "hello"
    assert json.loads(seen.pop("DELAY_HEADERS")) == {"a": "1"}
    assert seen.pop("DELAY_DELIVER_AT").endswith("Z")
    assert seen == {
        "DELAY_MESSAGE_ID": "m1",
        "DELAY_CHANNEL": "orders",
        "DELAY_KEY": "k",
        "DELAY_CONTENT_TYPE": "text/x",
        "DELAY_PRIORITY": "4",
        "DELAY_HANDLED_COUNT": "0",
    }


def test_exit_code_75_defers_the_message(one: CommandLine, script: Callable[[str], str]) -> None:
    """A1, A2, A15, A23: back to its own channel, with its count raised, without waiting here."""
    result = one(
        "consume",
        "orders",
        "--limit",
        "1",
        "--timeout",
        "20",
        "--exec",
        script("raise SystemExit(75)"),
        "--defer-seconds",
        "3600",
    )
    assert (result.code, result.err) == (0, "handled 0, deferred 1, dead-lettered 0\n")
    shown = one.document("show", "m1")
    assert (shown["state"], shown["channel"], shown["handled_count"]) == ("SCHEDULED", "orders", 1)


def test_another_exit_code_dead_letters_the_message(one: CommandLine, script: Callable[[str], str]) -> None:
    """A25: to the dead-letter channel, with the reason, and without a traceback."""
    command = script("import sys; sys.stdin.read(); sys.exit(3)")
    result = one("consume", "orders", "--limit", "1", "--timeout", "20", "--exec", command)
    assert result.code == 0
    assert "handled 0, deferred 0, dead-lettered 1\n" in result.err
    assert "Traceback" not in result.out + result.err
    shown = one.document("show", "m1")
    assert shown["state"] == "DEAD"
    assert "exited with 3" in shown["history"][-1]["reason"]
    (dead,) = one("consume", "orders.dead", "--limit", "1", "--timeout", "20").lines
    assert dead["payload"] == "hello"


def test_a_message_deferred_too_often_is_dead_lettered(one: CommandLine, script: Callable[[str], str]) -> None:
    """A24, A25: never retried forever; the dead-letter channel can be named."""
    words = ["--exec", script("raise SystemExit(75)"), "--defer-seconds", "0", "--max-handled", "2"]
    result = one("consume", "orders", "--limit", "3", "--timeout", "20", *words, "--dead-letter-channel", "graveyard")
    assert "handled 0, deferred 2, dead-lettered 1\n" in result.err
    assert len(one("consume", "graveyard", "--limit", "1", "--timeout", "20").lines) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--exec", "no-such-program-here --x"],
            "exec: 'no-such-program-here --x' is not a command; name an executable program",
        ),
        (["--exec", "sh -c 'open"], 'exec: "sh -c \'open" is not a command (No closing quotation); close the quotes'),
        (["--exec", ""], "exec: '' is not a command; name an executable program"),
        (["--exec", "true", "--print"], "exec: cannot be combined with --print; give only one of them"),
        (["--limit", "0"], "limit: '0' is not a whole number of at least 1; use"),
        (["--timeout", "-1"], "timeout: '-1' is not a duration in seconds; use"),
        (["--timeout", "nan"], "timeout: 'nan' is not a duration in seconds; use"),
        (["--visibility", "long"], "visibility: 'long' is not a duration in seconds; use"),
        (["--exec", "true", "--defer-seconds", "x"], "defer-seconds: 'x' is not a duration in seconds; use"),
        (["--max-handled", "none"], "max-handled: 'none' is not a whole number of at least 1; use"),
        (["--dead-letter-channel", "a b"], "channel: 'a b' is not a valid channel name; use"),
    ],
)
def test_bad_input_is_refused_and_the_message_stays(one: CommandLine, words: list[str], problem: str) -> None:
    """B3."""
    result = one("consume", "orders", "--timeout", "0", *words)
    assert result.code == 2
    assert result.err.startswith(problem)
    assert len(one("consume", "orders", "--limit", "1", "--timeout", "20").lines) == 1


def test_a_bad_channel_is_refused(delay: CommandLine) -> None:
    result = delay("consume", "a b", "--timeout", "0")
    assert (result.code, result.err.startswith("channel: 'a b' is not a valid channel name")) == (2, True)


def test_a_command_that_cannot_be_started_leaves_the_message(one: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem of this machine is no reason to dead-letter a message."""

    def no_memory(*args: Any, **options: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", no_memory)
        result = one("consume", "orders", "--exec", "true", "--visibility", "0")
    assert (result.code, result.err) == (3, "exec: true could not be started (Cannot allocate memory); try again\n")
    assert len(one("consume", "orders", "--limit", "1", "--timeout", "20").lines) == 1


def test_a_closed_pipe_leaves_the_message(one: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither acknowledged nor dead-lettered: it is delivered again."""
    with (tmp_path / "closed").open("w") as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", _Pipe(closed))
        result = one("consume", "orders", "--visibility", "0")
    assert result.code == 0
    assert state_of(one) == "DISPATCHED"
    assert len(one("consume", "orders", "--limit", "1", "--timeout", "20").lines) == 1


class _Pipe:
    """A standard output whose reader has gone."""

    def __init__(self, file: Any) -> None:
        self.fileno = file.fileno
        self.write = _raise_broken_pipe

    def flush(self) -> None: ...


def _raise_broken_pipe(*_: object) -> None:
    raise BrokenPipeError(32, "Broken pipe")


def test_a_signal_ends_an_idle_consumer(delay: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """B23: graceful, code 0."""
    look = Consumer.run_once
    looks: list[Consumed] = []

    def run_and_signal(self: Consumer, **options: Any) -> Consumed:
        looks.append(look(self, **options))
        if len(looks) == 2:
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM)).start()
        return looks[-1]

    monkeypatch.setattr(Consumer, "run_once", run_and_signal)
    result = delay("consume", "orders")
    assert (result.code, result.err) == (0, "handled 0, deferred 0, dead-lettered 0\n")


def test_a_signal_lets_the_command_finish(one: CommandLine) -> None:
    """B23: the message is settled by how the command ended, Ctrl-C does not reach it."""
    result = one("consume", "orders", "--exec", "sh -c 'cat >/dev/null; kill -INT $PPID; sleep 0.5'")
    assert (result.code, result.err) == (0, "handled 1, deferred 0, dead-lettered 0\n")


def test_a_second_signal_ends_at_once_and_the_message_comes_again(
    one: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwiceAsked(threading.Event):
        """Once the first signal is seen, the second one comes."""

        def set(self) -> None:
            super().set()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(consume, "Event", TwiceAsked)
    # It has read all when it is surely looked after.
    command = "sh -c 'cat >/dev/null; kill -INT $PPID; sleep 300; true'"
    result = one("consume", "orders", "--exec", command, "--visibility", "1")
    assert result.code == 130
    assert state_of(one) == "DISPATCHED"
    assert len(one("consume", "orders", "--limit", "1", "--timeout", "60").lines) == 1
