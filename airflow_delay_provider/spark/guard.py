"""A program that runs a command and leaves nothing of it behind, however it ends and whoever is killed.

``guard.py command argument ...`` with a pipe as standard input, the *lifeline*, whose other end only its owner has.
The owner's death closes the lifeline, also when that was by kill -9. Then, and on SIGTERM or SIGINT, the command and
all that it started are asked to end, and killed if they do not. What a command leaves running when it ends by itself
is ended likewise. The exit code is the command's, 128 + n when signal n killed it.

Everything is found because the guard adopts orphans: whatever the command started stays below the guard in the
process tree, whatever its group, session or parent. The guard itself is not safe from kill -9. Then the kernel kills
the command (spark-submit, which is the JVM), and the owner ends the session of the guard: `end_session`.

It starts with each job, so it imports little: only the standard library, and no package of ours.
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
#: What a JVM gets to take leave of the cluster.
GRACE_SECONDS = 5.0
LOOK_SECONDS = 0.02
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
    reap(reaped)  # what ended between the last reaping and the last look
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
    # Until the child has handlers of its own, it would swallow the signal that shall end it.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return child
    try:
        ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it was killed before the kernel was asked
            os._exit(NOT_STARTED)
        # Away from the guard, so that a signal to the group of the command does not reach it.
        os.setpgid(0, 0)
        for signum in (signal.SIGCHLD, *STOP_SIGNALS):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        # The lifeline is the guard's.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)  # noqa: S606 - that is what the guard is for
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def wait_for_event(woken: int) -> bool:
    """Wait for a signal or the end of the lifeline; return whether the command shall be stopped."""
    lifeline = sys.stdin.fileno()
    ready, _, _ = select.select([lifeline, woken], [], [])
    signals = os.read(woken, 1024) if woken in ready else b""
    ended = lifeline in ready and not os.read(lifeline, 1024)
    return ended or any(signum in signals for signum in STOP_SIGNALS)


def reap(reaped: dict[int, int]) -> None:
    """Take the status of all children that have ended, adopted ones among them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            reaped[ended[0]] = ended[1]


def exit_code_of(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_session(session: int) -> None:
    """End what is left of the session of a guard that was killed."""
    end_all(lambda: [pid for pid, _, its_session in running() if its_session == session])


def end_all(
    find: Callable[[], Collection[int]], *, reap: Callable[[], object] = lambda: None, grace: float = GRACE_SECONDS
) -> None:
    """Ask all that ``find`` finds to end, and kill what is there after ``grace`` seconds; return when none is left."""
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while left := find():
        late = time.monotonic() >= deadline
        for pid in left:
            if late or pid not in asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        time.sleep(LOOK_SECONDS)
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
            # The program's name comes before and may hold anything, a closing parenthesis too.
            state, parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
            if state not in (b"Z", b"X"):
                yield int(name), int(parent), int(session)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
