"""Ends whole sessions of processes, also when their parent is gone, even by kill -9.

Run as a program it reads session ids until its standard input ends, which it does with the process that writes them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil


class Guardian:
    """A process of its own that outlives this one and kills the registered sessions."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, start_new_session=True)

    def watch(self, session_id: int) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(b"%d\n" % session_id)
            self._process.stdin.flush()

    def stop(self) -> None:
        """Let it kill what is left and end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def kill_session(session_id: int) -> None:
    """Kill -9 all processes of a session, whatever their process groups."""
    while running := running_members(session_id):
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def running_members(session_id: int) -> list[int]:
    """Return all processes of a session."""
    return [each.pid for each in psutil.process_iter(["status"]) if _belongs(each, session_id)]


def _belongs(candidate: psutil.Process, session_id: int) -> bool:
    try:
        return os.getsid(candidate.pid) == session_id and candidate.info["status"] != psutil.STATUS_ZOMBIE
    except ProcessLookupError:
        return False


if __name__ == "__main__":
    for session in {int(line) for line in sys.stdin.buffer.readlines()}:
        kill_session(session)
