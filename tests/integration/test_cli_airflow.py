"""`airflow delay ...` as its users run it: another process, its output piped, its exit code read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from sysconfig import get_path

import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.arguments import compose_message

AIRFLOW = str(Path(get_path("scripts")) / "airflow")
PATIENCE_SECONDS = 180.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(sqlite_url: str, tmp_path: Path) -> Start:
    """Starts `airflow delay` with its own Airflow home on the ledger of the test."""
    environment = os.environ | {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__DELAY__LEDGER_URL": sqlite_url}

    def run(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [AIRFLOW, "delay", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return run


@pytest.fixture
def broker(sqlite_url: str) -> EmbeddedBroker:
    return EmbeddedBroker(Ledger(sqlite_url))


def test_a_scheduled_message_is_printed_as_one_json_document(start: Start, broker: EmbeddedBroker) -> None:
    """A48: through Airflow's own command line, with nothing else on stdout and nothing on stderr."""
    words = ["orders", "--payload", "x", "--after", "3600", "--id", "m1", "--output", "json"]
    with start("schedule", *words) as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["outcome"] == "scheduled"
    broker.cancel(["m1"])
    broker.close()


def test_bad_input_ends_with_code_2_and_one_sentence(start: Start) -> None:
    """B3."""
    with start("schedule", "orders", "--payload", "x", "--at", "2035-01-31T17:00:00") as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("--at (deliver_at): 2035-01-31T17:00:00 has no time zone; add one")
    assert err.count("\n") == 1


def test_a_closed_pipe_loses_no_message(start: Start, broker: EmbeddedBroker) -> None:
    """Like `airflow delay consume orders | head -1`: unread messages are delivered again."""
    now = broker.clock.now()
    many = [compose_message("orders", "x" * 100_000, message_id=f"m{n}", now=now) for n in range(5)]
    broker.schedule(many)
    with start("consume", "orders", "--visibility", "0.001") as process:
        assert process.stdout
        first = json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr
        assert process.stderr.read() == ""
    assert first["message_id"] == "m0"
    left = {delivery.message.id for delivery in broker.receive("orders", limit=10)}
    assert {"m3", "m4"} <= left
    broker.close()


def test_the_dispatcher_delivers_until_it_is_stopped(start: Start, broker: EmbeddedBroker) -> None:
    """B23: started, serving and gracefully stopped by `airflow delay dispatcher`."""
    now = broker.clock.now()
    broker.schedule([compose_message("orders", "x", message_id="m1", deliver_after=3600, now=now)])
    broker.expedite(["m1"])
    assert not broker.peek("orders")
    with start("dispatcher", "--health-port", "0") as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not broker.peek("orders"):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    broker.close()
