"""The dispatcher as it runs in production: a process of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.measuring import MismatchError

READY_SECONDS = 30.0
STOP_SECONDS = 30.0


@contextmanager
def dispatchers(url: str, n: int = 1) -> Iterator[None]:
    """Run ``n`` dispatcher processes on the ledger at ``url``; all of them look for due messages on entry."""
    with ExitStack() as running:
        ports = [running.enter_context(_dispatcher(url)) for _ in range(n)]
        for port in ports:
            _wait_until_well(port)
        yield


@contextmanager
def _dispatcher(url: str) -> Iterator[int]:
    port = _free_port()
    command = [sys.executable, "-m", "airflow_delay_provider.dispatcher", "--ledger", url, "--health-port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield port
        finally:
            process.terminate()
            code = process.wait(STOP_SECONDS)
        if code != 0:
            log.seek(0)
            raise MismatchError(f"the dispatcher ended with {code}:\n{log.read()}")


def _wait_until_well(port: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not _is_well(port):
        if time.monotonic() > deadline:
            raise MismatchError(f"the dispatcher was not ready after {READY_SECONDS} s")
        time.sleep(0.02)


def _is_well(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            loops = json.load(answer)["loops"]
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return "dispatch_due" in loops and all(loop["last_run_ended_at"] for loop in loops.values())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
