"""Server software that every run would otherwise download again, cached for all checkouts of this user."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.servers import process


class CannotFillError(Exception):
    """A folder of the cache could not be filled; the message is the first output of the program."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airflow-delay-provider"


def cached(name: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, filled once.

    It is complete or not there, also when another run fills it at the same time or was killed while doing so.
    """
    folder, unfinished = cache() / name, cache() / f"{name}.unfinished"
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            fill(unfinished)
            unfinished.rename(folder)
    return folder


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, *, on_line: Callable[[str], None] = lambda _line: None
) -> None:
    """Run a program that must not outlive us: the next holder of the lock starts from the beginning."""
    lines = []
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=process.dies_with_parent(signal.SIGKILL),
    ) as running:
        for line in running.stdout or ():
            lines.append(line.rstrip())
            on_line(lines[-1])
    if running.returncode != 0:
        complaints = [line for line in lines if line.startswith(("E:", "W:"))]
        raise CannotFillError("\n".join((complaints or lines)[:3]))
