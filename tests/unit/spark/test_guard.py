"""The guard of a command: after any kill, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

from airflow_delay_provider.spark.process import guard
from airflow_delay_provider.spark.process.submit import guarded
from tools.servers import component

wait_for = partial(component.wait_for, seconds=60, interval=0.02)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard is for Linux")

#: A process of its own that holds the lifeline of a guard, as a task does, and says the guard's id.
OWNER = """
import subprocess, sys, time
guarded = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(guarded.pid, flush=True)
time.sleep(600)
"""
#: Children in the same group, in a group and in a session of their own, and an orphan.
FAMILY = """
sleep {mark} &
python3 -c 'import os; os.setpgid(0, 0); os.execvp("sleep", ["sleep", "{mark}"])' &
setsid sleep {mark} &
(sleep {mark} &)
"""
DEAF = """
sh -c 'trap "" TERM; sleep {mark}; sleep {mark}' &
"""


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        guarded(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its owner alive."""
    process = start(*command)
    try:
        assert process.stdout is not None
        output = process.stdout.read()
        return subprocess.CompletedProcess(command, process.wait(60), output)
    finally:
        process.communicate()


@pytest.fixture
def mark() -> Iterator[str]:
    """A number of seconds by which the processes of one test are distinguished from all others."""
    chosen = f"{600 + time.time_ns() % 10**9 / 10**9:.9f}"
    yield chosen
    for process in marked(chosen):
        process.kill()


def marked(mark: str) -> list[psutil.Process]:
    def is_marked(each: psutil.Process) -> bool:
        return mark in " ".join(each.info["cmdline"] or ()) and each.info["status"] != psutil.STATUS_ZOMBIE

    return [each for each in psutil.process_iter(["cmdline", "status"]) if is_marked(each)]


def sleepers(mark: str) -> int:
    return sum(each.info["cmdline"] == ["sleep", mark] for each in marked(mark))


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 1", 1), ("exit 75", 75), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_the_exit_code_is_the_commands_own(script: str, code: int) -> None:
    assert run("sh", "-c", script).returncode == code


def test_the_output_of_the_command_is_passed_on() -> None:
    assert run("sh", "-c", "echo out; echo err >&2; cat").stdout == "out\nerr\n"


def test_a_missing_command_is_reported() -> None:
    done = run("no-such-spark-submit")
    assert done.returncode == guard.NOT_STARTED
    assert done.stdout == "no-such-spark-submit: No such file or directory\n"


def test_processes_that_a_command_leaves_behind_are_stopped(mark: str) -> None:
    assert run("sh", "-c", FAMILY.format(mark=mark) + "exit 3").returncode == 3
    assert marked(mark) == []


def test_an_owner_killed_leaves_nothing_of_the_command(mark: str) -> None:
    script = f"{FAMILY}{DEAF}sleep {{mark}}".format(mark=mark)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *guarded(["sh", "-c", script])], stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: sleepers(mark) == 6, what="all run")
    owner.kill()
    owner.communicate()
    wait_for(lambda: not marked(mark), what="nothing runs")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_guard_asked_to_stop_ends_everything_first(mark: str, signum: int) -> None:
    process = start("sh", "-c", FAMILY.format(mark=mark) + f"exec sleep {mark}")
    wait_for(lambda: sleepers(mark) == 5, what="all run")
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert marked(mark) == []


def test_a_guard_that_was_killed_takes_the_command_with_it_and_its_session_can_be_ended(mark: str) -> None:
    process = start("sh", "-c", f"sleep {mark} & exec sleep {mark}")
    wait_for(lambda: sleepers(mark) == 2, what="both run")
    process.kill()
    wait_for(lambda: sleepers(mark) == 1, what="the command is killed, its child is not")
    guard.end_session(process.pid)
    assert marked(mark) == []
    process.communicate()


def test_an_owner_that_is_gone_before_the_guard_has_started_leaves_nothing(mark: str) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with subprocess.Popen(guarded(["sleep", mark]), stdin=reader) as process:
        os.close(reader)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert marked(mark) == []


def test_every_moment_of_the_start_is_safe_from_a_killed_owner(mark: str) -> None:
    for step in range(12):
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, *guarded(["sh", "-c", FAMILY.format(mark=mark) + f"sleep {mark}"])],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert owner.stdout is not None
        owner.stdout.readline()
        time.sleep(step * 0.01)  # another moment each time, from before the command until after it
        owner.kill()
        owner.communicate()
    wait_for(lambda: not marked(mark), what="nothing runs")
