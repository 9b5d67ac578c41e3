"""The dispatcher as its own process: health, metrics, outages, and a graceful end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.heartbeats import GONE_AFTER, find_gap
from airflow_delay_provider.domain.message import Message
from tests.databases import execute, require_postgres
from tests.heartbeats import dispatchers_of, let_pass
from tools.servers import component

PATIENCE_SECONDS = 120.0
LOOPS = {
    "dispatch_embedded",
    "rescue_stale",
    "prune",
    "serve_destinations",
    "fold_statistics",
    "check_brokers",
    "heartbeat",
}
PROGRAM = ("-m", "airflow_delay_provider.dispatcher")
#: The same, but a loop that has not finished a run for a second is not well.
IMPATIENT = (
    "-c",
    "import sys; from airflow_delay_provider.dispatcher import __main__, loop; loop.STALLED_SECONDS = 1.0;"
    "sys.exit(__main__.main())",
)

wait_for = partial(component.wait_for, seconds=PATIENCE_SECONDS, interval=0.02)


class Process:
    """A dispatcher process and what it says."""

    def __init__(self, log: Path, *arguments: str, program: Sequence[str] = PROGRAM) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *program, "--health-port", "0", *arguments],
                stderr=file,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        wait_for(lambda: "Health and metrics" in self.log, what="the health server to start")
        found = re.search(r"(http://\S+)/health", self.log)
        assert found
        return found[1]

    def health(self) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"{self.url}/health") as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text: str = answer.read().decode()
            return text

    def signal(self, number: signal.Signals) -> int:
        self._process.send_signal(number)
        return self._process.wait(PATIENCE_SECONDS)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_SECONDS)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running(tmp_path: Path, *arguments: str, program: Sequence[str] = PROGRAM) -> Iterator[Process]:
    process = Process(tmp_path / "dispatcher.log", *arguments, program=program)
    try:
        yield process
    finally:
        process.kill()


def schedule(ledger: Ledger, delay: timedelta) -> str:
    message = Message(channel="c", payload=b"", deliver_at=datetime.now(UTC) + delay)
    EmbeddedBroker(ledger).schedule([message])
    return message.id


def test_the_process_dispatches_reports_and_stops_gracefully(ledger: Ledger, ledger_url: str, tmp_path: Path) -> None:
    """B23, B38, B39, B41, B50"""
    with running(tmp_path, "--ledger", ledger_url) as process:
        wait_for(lambda: set(process.health()[1]["loops"]) == LOOPS, what="a good start")
        first = schedule(ledger, timedelta(hours=1))
        schedule(ledger, timedelta(hours=1))
        # What is due when it is scheduled is dispatched there, not by the process.
        EmbeddedBroker(ledger).expedite([first])
        wait_for(lambda: len(EmbeddedBroker(ledger).peek("c")) == 1, what="the message in its channel")
        # Counted after it is there.
        wait_for(lambda: "delay_lateness_seconds_count 1.0" in process.metrics(), what="the message in /metrics")
        status, report = process.health()
        assert status == 200
        assert report["well"] is True
        assert set(report["loops"]) == LOOPS
        metrics = process.metrics()
        assert 'delay_dispatched_total{channel="c"} 1.0' in metrics
        assert "delay_scheduled 1.0" in metrics
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"{process.url}/elsewhere")
        refused.value.close()
        assert process.signal(signal.SIGTERM) == 0
        assert "unfinished: nothing" in process.log


def status_of(ledger: Ledger) -> list[str]:
    return [each.status for each in dispatchers_of(ledger)]


def gap_of(ledger: Ledger) -> str:
    gap = find_gap(dispatchers_of(ledger))
    return "" if gap is None else gap.problem


def test_the_ledger_knows_a_dispatcher_that_was_stopped(ledger: Ledger, ledger_url: str, tmp_path: Path) -> None:
    """B40, B41"""
    with running(tmp_path, "--ledger", ledger_url) as process:
        wait_for(lambda: dispatchers_of(ledger), what="the first heartbeat")
        [record] = dispatchers_of(ledger)
        assert (record.is_alive, record.pid) == (True, process.pid)
        assert {loop.name for loop in record.loops} == LOOPS - {"heartbeat"}
        assert gap_of(ledger) == ""
        assert process.signal(signal.SIGTERM) == 0
    assert status_of(ledger) == ["stopped"]
    assert f"({record.owner} was stopped then)" in gap_of(ledger)


def test_the_ledger_misses_a_dispatcher_that_was_killed(ledger: Ledger, ledger_url: str, tmp_path: Path) -> None:
    """B40, B41"""
    with running(tmp_path, "--ledger", ledger_url) as process:
        wait_for(lambda: dispatchers_of(ledger), what="the first heartbeat")
        # As if it had not been heard of for a while: the next heartbeat mends that.
        let_pass(ledger, GONE_AFTER)
        wait_for(lambda: status_of(ledger) == ["alive"], what="the next heartbeat")
        process.kill()
        let_pass(ledger, GONE_AFTER)
    assert status_of(ledger) == ["gone"]
    assert "no dispatcher has been seen since" in gap_of(ledger)


def test_a_killed_dispatcher_is_missed_within_15_seconds(sqlite_url: str, tmp_path: Path) -> None:
    """B40, B41"""
    ledger = Ledger(sqlite_url)
    with running(tmp_path, "--ledger", sqlite_url) as process:
        wait_for(lambda: status_of(ledger) == ["alive"], what="the first heartbeat")
        process.kill()
        killed_at = time.monotonic()
        wait_for(lambda: status_of(ledger) == ["gone"], what="its absence is noticed")
        assert time.monotonic() - killed_at < 15
    ledger.close()


def test_the_ledger_knows_that_a_loop_stands_still(postgres_url: str, tmp_path: Path) -> None:
    """B40, B41: the heartbeats continue, and report it."""
    ledger = Ledger(postgres_url)
    engine = create_engine(ledger.url)
    with running(tmp_path, "--ledger", postgres_url, program=IMPATIENT):
        wait_for(lambda: status_of(ledger) == ["alive"], what="the first heartbeat")
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE delay_scheduled_message IN ACCESS EXCLUSIVE MODE"))
            wait_for(
                lambda: "its loop dispatch_embedded has not finished a run" in gap_of(ledger), what="the stuck loop"
            )
            assert status_of(ledger) == ["unwell"]
        wait_for(lambda: gap_of(ledger) == "", what="the loop to go on")
    engine.dispose()
    ledger.close()


def test_an_outage_of_the_database_is_survived_and_shown(postgres_url: str, tmp_path: Path) -> None:
    """B34, B40, B50"""
    ledger = Ledger(postgres_url)
    name = ledger.url.database
    server = require_postgres()
    with running(tmp_path, "--ledger", postgres_url) as process:
        wait_for(lambda: process.health()[1]["well"], what="a good start")
        schedule(ledger, timedelta(milliseconds=500))
        ledger.close()
        execute(server, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        execute(server, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        wait_for(
            lambda: (
                "check that the database runs" in (process.health()[1]["loops"]["dispatch_embedded"]["error"] or "")
            ),
            what="the outage in /health",
        )
        assert process.health()[0] == 503
        execute(server, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
        wait_for(lambda: process.health()[0] == 200, what="the recovery in /health")
        assert 'delay_errors_total{loop="dispatch_embedded"}' in process.metrics()
        wait_for(lambda: len(EmbeddedBroker(ledger).peek("c")) == 1, what="the message after the outage")
    ledger.close()


def test_a_ledger_out_of_reach_at_the_start_ends_it_with_one_sentence(tmp_path: Path) -> None:
    """A12"""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"postgresql://delay:hidden@127.0.0.1:{closed.getsockname()[1]}/delay"
        with running(tmp_path, "--ledger", url) as process:
            assert process.wait() == 3
            error = [line for line in process.log.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "check that the database runs" in error[0]
    assert "hidden" not in process.log
    assert "Traceback" not in process.log


def test_a_health_port_in_use_is_named(sqlite_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with running(tmp_path, "--ledger", sqlite_url, "--health-port", port) as process:
            assert process.wait() == 3
    assert f"cannot listen on 127.0.0.1:{port}" in process.log


def test_the_standalone_dispatcher_does_not_import_airflow(sqlite_url: str) -> None:
    code = (
        "import sys, airflow_delay_provider.dispatcher.__main__ as m;"
        "assert m._parser();"
        "sys.exit(any(name == 'airflow' or name.startswith('airflow.') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
