"""The dispatcher as it runs in production: a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

from benchmarks.measurement import MismatchError

READY_SECONDS = 120.0
STOP_SECONDS = 120.0


@contextmanager
def dispatchers(url: str, n: int = 1) -> Iterator[None]:
    """Run ``n`` dispatcher processes on the ledger at ``url``; all of them poll for due messages on entry."""
    with ExitStack() as running:
        logs = [running.enter_context(_dispatcher(url)) for _ in range(n)]
        for log in logs:
            _wait_until_well(log)
        yield


@contextmanager
def _dispatcher(url: str) -> Iterator[IO[str]]:
    """Run a dispatcher that says in its log on which free port it answers."""
    command = [sys.executable, "-m", "airflow_delay_provider.dispatcher", "--ledger", url, "--health-port", "0"]
    with tempfile.NamedTemporaryFile("r") as log, open(log.name, "w") as writing:
        process = subprocess.Popen(command, stdout=writing, stderr=writing)
        try:
            yield log
        finally:
            process.terminate()
            code = process.wait(STOP_SECONDS)
        if code != 0:
            log.seek(0)
            raise MismatchError(f"the dispatcher ended with {code}:\n{log.read()}")


def _wait_until_well(log: IO[str]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not _is_well(log):
        if time.monotonic() > deadline:
            raise MismatchError(f"the dispatcher was not ready after {READY_SECONDS} s")
        time.sleep(0.02)


def _is_well(log: IO[str]) -> bool:
    log.seek(0)
    said = re.search(r"http://\S+/health", log.read())
    if said is None:
        return False
    try:
        with urllib.request.urlopen(said[0], timeout=1) as answer:
            loops = json.load(answer)["loops"]
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return "dispatch_embedded" in loops and all(loop["last_run_ended_at"] for loop in loops.values())
