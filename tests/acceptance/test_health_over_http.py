"""What ``/delay/v1/health`` says when a dispatcher, a broker or a clock fails, and how soon; and when it is back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import kafkas, rabbits
from tests.integration.api_server import REPOSITORY, ApiServer, run_api_server
from tools.servers.component import Component, stop_all, wait_for
from tools.servers.sessions import Guardian

pytestmark = pytest.mark.timeout(600)

#: How soon a failure is reported, and that it is over.
WITHIN_SECONDS = 15
#: Until everything that was started works, on a busy machine.
START_SECONDS = 120
PYTHON = [sys.executable, "-m"]

Problem = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Monitored:
    """An api-server, and the dispatchers whose health it shows."""

    server: ApiServer
    client: httpx.Client
    guardian: Guardian

    def problems(self) -> list[Problem]:
        found: list[Problem] = self.client.get("health").raise_for_status().json()["problems"]
        return found

    def wait_for_problem(self, *texts: str, seconds: float = WITHIN_SECONDS) -> Problem:
        """Return the problem whose text contains all ``texts``."""

        def look() -> Problem | None:
            return next((each for each in self.problems() if all(text in each["text"] for text in texts)), None)

        return wait_for(look, what=f"a problem with {texts} is reported", seconds=seconds)

    def wait_until_well(self, *, seconds: float = WITHIN_SECONDS) -> None:
        try:
            wait_for(lambda: not self.problems(), what="no problem is reported", seconds=seconds)
        except TimeoutError:
            assert self.problems() == []

    @contextmanager
    def dispatcher(self, *command: str, **connections: Any) -> Iterator[Component]:
        """Run a dispatcher until it is alive in the health report, and stop it at the end."""
        folder = self.server.folder
        env = self.environment(**connections)
        running = Component(
            f"dispatcher-{len(list(folder.glob('dispatcher-*.log')))}",
            [*PYTHON, *(command or ("airflow_delay_provider.dispatcher", "--ledger", self.server.ledger_url))],
            log_dir=folder,
            env=env,
            guardian=self.guardian,
        )
        running.start()
        try:
            wait_for(self._is_served, what="a dispatcher is alive", seconds=START_SECONDS, components=[running])
            yield running
        finally:
            stop_all([running])

    def create_topology(self, conn_id: str, connection: Any) -> None:
        command = [*PYTHON, "airflow", "delay", "topology", "create", "--conn-id", conn_id]
        environment = self.environment(**{conn_id: connection})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr

    def environment(self, **connections: Any) -> dict[str, str]:
        given = {f"AIRFLOW_CONN_{conn_id.upper()}": json.dumps(each) for conn_id, each in connections.items()}
        home = {"AIRFLOW_HOME": str(self.server.folder), "PYTHONPATH": str(REPOSITORY)}
        return {**os.environ, **home, "AIRFLOW__DELAY__LEDGER_URL": self.server.ledger_url, **given}

    def _is_served(self) -> bool:
        found = self.client.get("health").raise_for_status().json()["dispatchers"]
        return any(each["status"] == "alive" for each in found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with run_api_server(tmp_path_factory.mktemp("airflow")) as running:
        yield running


@pytest.fixture
def monitored(server: ApiServer) -> Iterator[Monitored]:
    guardian = Guardian()
    with server.client("viewer") as client:
        yield Monitored(server=server, client=client, guardian=guardian)
    guardian.stop()


def serving(monitored: Monitored, *options: str) -> list[str]:
    """The command of a dispatcher with further options."""
    ledger = ("--ledger", monitored.server.ledger_url, "--health-port", "-1")
    return ["airflow_delay_provider.dispatcher", *ledger, *options]


def test_a_killed_dispatcher_is_reported(monitored: Monitored) -> None:
    with monitored.dispatcher(*serving(monitored)) as dispatcher:
        monitored.wait_until_well(seconds=START_SECONDS)
        dispatcher.kill()
        problem = monitored.wait_for_problem("No dispatcher has been seen since")
        assert problem["severity"] == "error"
        assert problem["remedy"] == "Start one with `airflow delay dispatcher`."
    with monitored.dispatcher(*serving(monitored)):
        monitored.wait_until_well()


@pytest.mark.parametrize("ahead", [30, -30])
def test_a_shifted_clock_is_reported(monitored: Monitored, ahead: int) -> None:
    command = ["tests.acceptance.shifted_dispatcher", monitored.server.ledger_url, str(ahead)]
    with monitored.dispatcher(*command):
        problem = monitored.wait_for_problem("clock of dispatcher", "s ahead of" if ahead > 0 else "s behind")
        assert abs(float(problem["text"].partition(" is ")[2].split()[0])) == pytest.approx(30, abs=1)
        assert "NTP" in problem["remedy"]
    with monitored.dispatcher(*serving(monitored)):
        monitored.wait_until_well()


def follow_outage(
    monitored: Monitored, conn_id: str, *, kill: Callable[[], object], start_again: Callable[[], object]
) -> None:
    """A broker that dies is reported, and no longer once it is back."""
    monitored.wait_until_well(seconds=START_SECONDS)
    kill()
    problem = monitored.wait_for_problem(f"broker of connection '{conn_id}' cannot be used")
    assert (problem["severity"], problem["subject"]) == ("error", conn_id)
    assert problem["remedy"].startswith("Start the broker, or correct the connection.")
    start_again()
    monitored.wait_until_well()


def test_a_stopped_rabbitmq_is_reported(monitored: Monitored, tmp_path: Path) -> None:
    with rabbits.private_node(tmp_path) as node:
        connection = rabbits.connection_of(node.url, management_url=node.management_url)
        monitored.create_topology("rabbit", connection)
        with monitored.dispatcher(*serving(monitored, "--index", "rabbit"), rabbit=connection):
            follow_outage(monitored, "rabbit", kill=node.kill, start_again=node.start_again)


def test_a_stopped_kafka_is_reported(monitored: Monitored, tmp_path: Path) -> None:
    with kafkas.private_broker(tmp_path) as node:
        connection = kafkas.connection_of(node.bootstrap)
        monitored.create_topology("kafka", connection)
        with monitored.dispatcher(*serving(monitored, "--kafka", "kafka"), kafka=connection):
            follow_outage(monitored, "kafka", kill=node.kill, start_again=node.start_again)
