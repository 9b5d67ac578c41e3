"""Start private servers, run a command with their addresses in its environment, stop them again."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tools.servers.chromium import Chromium
from tools.servers.kafka import Kafka
from tools.servers.postgres import Postgres
from tools.servers.process import dies_with_parent
from tools.servers.rabbitmq import RabbitMQ, RabbitMQ4
from tools.servers.server import Server, UnavailableError

SERVERS: dict[str, Callable[[], Server]] = {
    "postgres": Postgres,
    "rabbitmq": RabbitMQ,
    "rabbitmq4": RabbitMQ4,
    "kafka": Kafka,
    "chromium": Chromium,
}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: What a command interrupted by us gets to clean up after itself.
PATIENCE_SECONDS = 30


class Stopped(BaseException):
    """One of STOP_SIGNALS arrived."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.servers", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="logs and data of this run go here")
    parser.add_argument("names", nargs="*", metavar="server", help=f"of: {', '.join(SERVERS)}")
    if "--" not in sys.argv:
        parser.error("the command to run follows a --")
    split = sys.argv.index("--")
    arguments, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if unknown := set(arguments.names) - set(SERVERS):
        parser.error(f"no such server: {', '.join(sorted(unknown))}")

    on_stop_signals(raise_stopped)
    run_dir = arguments.run_dir.resolve()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    code = 1
    try:
        with ExitStack() as stack:
            try:
                code = run(command, start_servers(arguments.names, run_dir, stack))
            finally:
                on_stop_signals(signal.SIG_IGN)  # stopping the servers is bounded in time: let it finish
    except Stopped as stopped:
        code = 128 + stopped.signum
    except (UnavailableError, RuntimeError) as error:
        print(f"servers: {error}", file=sys.stderr)
    if code != 0:
        print(f"servers: exit code {code}; logs are in {run_dir / 'logs'}", file=sys.stderr)
    return code


def start_servers(names: Sequence[str], run_dir: Path, stack: ExitStack) -> dict[str, str]:
    environment: dict[str, str] = {}
    for name in names:
        server = SERVERS[name]()
        if os.environ.get(server.variable):
            print(f"servers: {name} is given by {server.variable}", flush=True)
            continue
        stack.callback(server.stop)
        try:
            server.start(run_dir)
        except UnavailableError as reason:
            if os.environ.get("CI") == "true":
                raise
            print(missing_banner(name, server.variable, reason), file=sys.stderr, flush=True)
            continue
        environment |= server.env()
        print(f"servers: {name} is up: {server.env()[server.variable]}", flush=True)
    return environment


def run(command: Sequence[str], environment: dict[str, str]) -> int:
    child = subprocess.Popen(command, env={**os.environ, **environment}, preexec_fn=dies_with_parent(signal.SIGTERM))
    try:
        code = child.wait()
    except Stopped as stopped:
        on_stop_signals(signal.SIG_IGN)
        if not (stopped.signum == signal.SIGINT and in_terminal_foreground()):
            child.send_signal(stopped.signum)
        try:
            child.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    return code if code >= 0 else 128 - code


def in_terminal_foreground() -> bool:
    """Then Ctrl-C has reached the command already, and a second SIGINT would cut its clean-up short."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def raise_stopped(signum: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped(signum)


def on_stop_signals(action: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, action)


def missing_banner(name: str, variable: str, reason: UnavailableError) -> str:
    line = "!" * 100
    return f"{line}\n!! {name} IS MISSING: its tests are skipped ({variable} stays unset).\n!! {reason}\n{line}"


if __name__ == "__main__":
    sys.exit(main())
