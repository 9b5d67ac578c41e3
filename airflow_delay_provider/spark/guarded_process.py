"""The owner's side of a guard: how a command is put under one, and how it is ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from airflow_delay_provider.spark import guard

#: The guard kills what does not end, so it needs a little more time than that gets.
PATIENCE_SECONDS = guard.GRACE_SECONDS + 2


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` under a guard; it wants a lifeline as standard input."""
    return [sys.executable, "-I", "-S", guard.__file__, *command]


@contextmanager
def lifeline() -> Iterator[int]:
    """A pipe that only this process keeps open: yield the end whose reader learns when this process is gone."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(writer)
        os.close(reader)


class GuardedProcess:
    """The process of a guard, which must not be killed: it would leave behind what it guards."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def kill(self) -> None:
        """Have the guard end everything; return once it has."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_SECONDS)
        if self.was_killed():
            guard.end_session(self._process.pid)

    def was_killed(self) -> bool:
        """Whether it ended without having ended what it guards."""
        code = self._process.poll()
        return code is not None and code < 0

    def close(self) -> None:
        """Close the end of its output."""
        if self._process.stdout is not None:
            self._process.stdout.close()
