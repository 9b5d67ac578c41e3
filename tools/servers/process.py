from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
#: Below those that Linux gives to outgoing connections.
SERVER_PORTS = range(20_000, 32_000)
#: Another one may just be installing, and a download may break off.
APT_PATIENCE = ("-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=5")
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def dies_with_parent(signum: int) -> Callable[[], None]:
    """For `preexec_fn`: the kernel sends `signum` when our process ends, even by kill -9.

    The kernel forgets this on a change of user, so change it with Popen's `user` (applied before), never
    with setpriv or runuser in the command.
    """

    def ask_kernel() -> None:
        if _libc is not None:
            _libc.prctl(PR_SET_PDEATHSIG, signum)

    return ask_kernel


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    death_signal: int = signal.SIGKILL,
    user: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a server in its own session: Ctrl-C reaches the tests first, which still need it to clean up."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            preexec_fn=dies_with_parent(death_signal),
        )


def stop(process: subprocess.Popen[bytes], *, signals: Sequence[int], patience_seconds: float = 15) -> None:
    """Send the signals in turn until the process ends; SIGKILL to its whole group comes last."""
    for signum in signals:
        if process.poll() is not None:
            return
        process.send_signal(signum)
        try:
            process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Return a free port that no outgoing connection takes: a killed server finds it free again."""
    for port in random.sample(SERVER_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port between {SERVER_PORTS.start} and {SERVER_PORTS.stop}")


def wait_until(ready: Callable[[], bool], *, process: subprocess.Popen[bytes], deadline_seconds: float) -> bool:
    """True once ready; False when the process ended or the deadline passed before."""
    deadline = time.monotonic() + deadline_seconds
    while process.poll() is None and time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(0.05)
    return False


def apt_install(*packages: str) -> bool:
    """Install Debian packages where we may; False where we may not."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    print(f"servers: installing {' '.join(packages)} with apt-get", flush=True)
    # Runlevel 1: packages do not start unwanted services.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update"], ["install", "-y", *packages]):
        done = subprocess.run(
            ["apt-get", *APT_PATIENCE, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode != 0:
            print(done.stdout.decode(errors="replace"), file=sys.stderr)
            return False
    return True
