from __future__ import annotations

from pathlib import Path
from typing import Protocol


class UnavailableError(Exception):
    """The component is not on this machine and cannot be installed; the message names the fix."""


class Server(Protocol):
    """One private server: a file here holds one, `__main__.SERVERS` lists it."""

    name: str
    #: The variable tests look for. Already set: that server is used as it is and ours is not started.
    variable: str

    def start(self, run_dir: Path) -> None:
        """Return once clients can connect. Raise UnavailableError where the component cannot be had."""

    def env(self) -> dict[str, str]:
        """What the command needs to find the started server, `variable` among it."""

    def stop(self) -> None:
        """End all processes and remove the data; the log stays. Safe after a failed start."""
