"""The machine and the name of this process, and the ledger that it uses by default."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine, or a container on it."""

    #: Containers have their own name, and two machines may have the same one.
    host: str
    #: The running kernel: all containers of a machine share it, and a restart of the machine changes it. None: unknown.
    boot_id: str | None
    booted_at_ms: int


def process_name() -> str:
    """Return a name that no other process has."""
    return f"{socket.gethostname()}:{os.getpid()}:{os.urandom(3).hex()}"


@cache
def this_machine() -> Machine:
    """Return the machine on which this process runs."""
    return Machine(host=socket.gethostname(), boot_id=_read_boot_id(), booted_at_ms=_booted_at_ms())


def _read_boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def _booted_at_ms() -> int:
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
    return int((time.time() - uptime) * 1000)


URL_VARIABLE = "AIRFLOW__DELAY__LEDGER_URL"


def default_ledger_url() -> str:
    """Return the URL of the environment, else a SQLite file in Airflow's home."""
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser().absolute()
    return os.environ.get(URL_VARIABLE) or f"sqlite:///{home / 'delay.db'}"
