"""One long-running process with its log: its last log lines when it dies, and no leftovers when it ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from tools.servers import process
from tools.servers.sessions import Guardian, kill_session, running_members

FoundT = TypeVar("FoundT")

#: What a component gets to end by itself; after that its whole session is killed.
PATIENCE_SECONDS = 5
LAST_LINES = 30


class ComponentDiedError(Exception):
    """A component ended that should still run."""


class Component:
    """A process and everything it starts, which is one session."""

    def __init__(
        self, name: str, command: Sequence[str], *, log_dir: Path, env: Mapping[str, str], guardian: Guardian
    ) -> None:
        self.name = name
        self.log = log_dir / f"{name}.log"
        self._command = command
        self._env = env
        self._guardian = guardian
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = process.spawn(self._command, log=self.log, env=self._env)
        self._guardian.watch(self._process.pid)

    def require_alive(self) -> None:
        if self._process is not None and (code := self._process.poll()) is not None:
            raise ComponentDiedError(f"{self.name} ended with code {code}; the end of {self.log}:\n{self.last_lines()}")

    def last_lines(self, count: int = LAST_LINES) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"    {line}" for line in lines[-count:])

    def ask_to_stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def wait_for_end(self, deadline: float) -> None:
        """Wait until ``deadline`` (of the monotonic clock), then leave nothing of it behind."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
            self.kill()

    def pids(self) -> list[int]:
        """Return the process and all that it started."""
        return [] if self._process is None else running_members(self._process.pid)

    def kill(self) -> None:
        """Kill -9 the process and all that it started."""
        if self._process is None:
            return
        kill_session(self._process.pid)
        self._process.wait()
        self._process = None


def stop_all(components: Iterable[Component]) -> None:
    """Stop all at once, so that the slowest one sets the time."""
    components = list(components)
    for component in components:
        component.ask_to_stop()
    deadline = time.monotonic() + PATIENCE_SECONDS
    for component in components:
        component.wait_for_end(deadline)


def wait_for(
    look: Callable[[], FoundT | None],
    *,
    what: str,
    seconds: float,
    components: Iterable[Component] = (),
    interval: float = 0.2,
) -> FoundT:
    """Return the first truthy result of ``look``; a component that dies meanwhile ends the wait."""
    components = list(components)
    deadline = time.monotonic() + seconds
    while not (found := look()):
        for component in components:
            component.require_alive()
        if time.monotonic() > deadline:
            logs = ", ".join(str(component.log) for component in components)
            raise TimeoutError(f"{what}: not within {seconds:g} s" + (f"; see {logs}" if logs else ""))
        time.sleep(interval)
    return found
