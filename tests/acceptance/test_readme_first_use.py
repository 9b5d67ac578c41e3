"""The commands of the README, run as they stand there, in an Airflow that has nothing but its own tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from sqlalchemy.engine import make_url

from tests.kafkas import require_kafka
from tests.rabbits import require_rabbitmq, under_test

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```shell\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
#: Runs the commands that it reads, one a line, in one process: each would spend six seconds on imports. Dispatchers,
#: which keep running, run beside it.
RUN = """
import shlex, signal, subprocess, sys
from airflow.__main__ import main
from tools.servers.process import dies_with_parent

dispatchers = []
for line in sys.stdin:
    words = shlex.split(line, comments=True)
    print("$", line, end="", flush=True)
    if words[1:3] == ["delay", "dispatcher"]:
        command = [sys.executable, "-m", *words, "--health-port", "0"]
        with open("dispatcher.log", "a") as log:
            dispatchers.append(
                subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=dies_with_parent(signal.SIGKILL))
            )
        continue
    sys.argv = words
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
for each in dispatchers:
    each.terminate()
    each.wait()
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A folder with Airflow's files, in which commands run."""

    folder: Path

    def follow(self, lines: list[str], **given: str) -> str:
        """Run commands and return what they printed."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
        home = {"AIRFLOW_HOME": str(self.folder), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            input="\n".join(lines) + "\n",
            cwd=self.folder,
            env=kept | home | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    made = Machine(folder=tmp_path_factory.mktemp("airflow"))
    made.follow(["airflow db migrate"])
    return made


def block(text: str, replace: dict[str, str]) -> list[str]:
    """The block of the README that contains a text; each of the texts to replace must be in it."""
    [found] = [each for each in BLOCKS if text in each]
    for shown, real in replace.items():
        assert shown in found
        found = found.replace(shown, real)
    return found.splitlines()


def fresh_channel() -> str:
    return f"reminders-{uuid4().hex}"


def assert_delivered(printed: str, channel: str) -> None:
    assert f'"channel": "{channel}"' in printed
    assert '"payload": "Hello"' in printed
    assert "handled 1, deferred 0, dead-lettered 0" in printed


def test_the_embedded_broker(machine: Machine) -> None:
    assert_delivered(machine.follow(block("--payload Hello --after 5\n", {})), "reminders")


def test_a_ledger_on_postgresql(machine: Machine, empty_postgres_url: str) -> None:
    url = make_url(empty_postgres_url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    export, *commands = block("AIRFLOW__DELAY__LEDGER_URL", {"postgresql+psycopg://delay:secret@db/delay": url})
    name, _, value = export.removeprefix("export ").partition("=")
    channel = fresh_channel()
    more = [f"airflow delay schedule {channel} --payload Hello --after 5", f"airflow delay consume {channel} --limit 1"]
    assert_delivered(machine.follow([*commands, *more], **{name: value}), channel)


def test_rabbitmq(machine: Machine) -> None:
    with under_test("rabbitmq4"):
        parts, channel = urlsplit(require_rabbitmq()), fresh_channel()
    real = {
        "rabbit1,rabbit2": f"{parts.hostname}:{parts.port}",
        "--conn-login airflow": f"--conn-login {parts.username}",
        "--conn-password secret": f"--conn-password {parts.password}",
        "reminders": channel,
    }
    assert_delivered(machine.follow(block("--conn-type rabbitmq", real)), channel)


def test_kafka(machine: Machine) -> None:
    channel = fresh_channel()
    real = {"kafka1:9092,kafka2:9092": require_kafka(), "reminders": channel}
    assert_delivered(machine.follow(block("--conn-type delay_kafka", real)), channel)
