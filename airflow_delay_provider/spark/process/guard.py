"""A program that runs a command and leaves none of its processes behind, even if the owner is killed.

``guard.py command argument ...`` with a pipe as standard input, the *lifeline*, whose other end only its owner has.
The owner's death closes the lifeline, even after kill -9. Then, and on SIGTERM or SIGINT, the guard sends SIGTERM to
the command and all its processes, and SIGKILL to those that remain. It does the same with processes that the command
leaves behind when it exits by itself. The exit code is the command's, 128 + n if signal n killed it.

The guard finds all processes because it adopts orphans: they stay below the guard in the process tree, whatever their
group, session or parent. If the guard itself gets kill -9, the kernel kills the command (spark-submit, which is the
JVM), and the owner stops the session of the guard: `end_session`.

The guard starts with each job, so it imports only a little of the standard library, and nothing of this package.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Time for a JVM to disconnect from the cluster.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02
NOT_STARTED = 127


def main(command: list[str]) -> int:
    ask_kernel(PR_SET_CHILD_SUBREAPER, 1)
    woken = listen_to_signals()
    child = start(command)
    reaped: dict[int, int] = {}
    stopped = False
    while child not in reaped and not stopped:
        stopped = wait_for_event(woken)
        reap(reaped)
    end_all(descendants, reap=lambda: reap(reaped))
    reap(reaped)  # processes that ended since the last reaping
    return exit_code_of(reaped.get(child, signal.SIGKILL))


def ask_kernel(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def listen_to_signals() -> int:
    """Return a pipe from which the numbers of the signals that arrive can be read."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for signum in (signal.SIGCHLD, *STOP_SIGNALS):
        signal.signal(signum, lambda *_: None)
    return readable


def start(command: list[str]) -> int:
    guard = os.getpid()
    # Until the child has its own handlers, it would swallow the signal that is to stop it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return child
    try:
        ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it was killed before the kernel was asked
            os._exit(NOT_STARTED)
        # Its own group, so that a signal to the group of the command does not reach the guard.
        os.setpgid(0, 0)
        for signum in (signal.SIGCHLD, *STOP_SIGNALS):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # The lifeline is the guard's.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)  # noqa: S606 - the purpose of the guard
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def wait_for_event(woken: int) -> bool:
    """Wait for a signal or the end of the lifeline; return whether to stop the command."""
    lifeline = sys.stdin.fileno()
    ready, _, _ = select.select([lifeline, woken], [], [])
    signals = os.read(woken, 1024) if woken in ready else b""
    ended = lifeline in ready and not os.read(lifeline, 1024)
    return ended or any(signum in signals for signum in STOP_SIGNALS)


def reap(reaped: dict[int, int]) -> None:
    """Take the exit status of all children that have ended, including adopted ones."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            reaped[ended[0]] = ended[1]


def exit_code_of(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_session(session: int) -> None:
    """Stop the remaining processes in the session of a guard that was killed."""
    end_all(lambda: [pid for pid, _, its_session in running() if its_session == session])


def end_all(
    find: Callable[[], Collection[int]], *, reap: Callable[[], object] = lambda: None, grace: float = GRACE_SECONDS
) -> None:
    """Send SIGTERM to all that ``find`` returns, SIGKILL after ``grace`` seconds; return when none is left."""
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while left := find():
        late = time.monotonic() >= deadline
        for pid in left:
            if late or pid not in asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        time.sleep(POLL_SECONDS)
        reap()


def descendants() -> list[int]:
    """Return all running processes below this one in the tree."""
    parents = {pid: parent for pid, parent, _ in running()}
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def running() -> Iterator[tuple[int, int, int]]:
    """Yield id, parent and session of all processes that have not ended."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
            # The program's name comes before and may hold anything, even a closing parenthesis.
            state, parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
            if state not in (b"Z", b"X"):
                yield int(name), int(parent), int(session)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
