"""``pytest -p tools.test_cost``: the time and the processor seconds of each test file, in a table at the end.

The seconds of a file are those of the tests' own process, of the processes that they start, and, under ``./dev test``
(which starts both), of the servers. Servers that others use at the same time count for the running test: use it alone
and without ``-n``.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

import psutil
import pytest

RUNNER = "tools.servers"


@dataclass
class Cost:
    """What was spent since it was made."""

    wall: float = field(default_factory=time.monotonic)
    own: float = field(default_factory=time.process_time)
    children: float = field(default_factory=lambda: _children_seconds())
    servers: float = field(default_factory=lambda: _server_seconds())
    tests: int = 0

    def until_now(self) -> Cost:
        now = Cost()
        return Cost(
            now.wall - self.wall,
            now.own - self.own,
            now.children - self.children,
            now.servers - self.servers,
            self.tests,
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.wall + other.wall,
            self.own + other.own,
            self.children + other.children,
            self.servers + other.servers,
            self.tests + other.tests,
        )

    @property
    def cpu(self) -> float:
        return self.own + self.children + self.servers


_by_file: dict[str, Cost] = {}
_current: Cost | None = None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    global _current
    if _current is None:
        _current = Cost()
    result = yield
    _current.tests += 1
    if nextitem is None or nextitem.path != item.path:
        file = item.nodeid.split("::")[0]
        _by_file[file] = _by_file.get(file, Cost(0, 0, 0, 0)) + _current.until_now()
        _current = None
        print(f"\n{_row(_by_file[file])} {file}", file=sys.__stderr__, flush=True)
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    families: dict[str, Cost] = {}
    for file, cost in _by_file.items():
        folder = str(PurePath(file).parent)
        families[folder] = families.get(folder, Cost(0, 0, 0, 0)) + cost
    for title, costs in (("files", _by_file), ("folders", families)):
        terminalreporter.section(f"cost of {title}: seconds")
        terminalreporter.write_line("tests    wall     cpu =   own + started + servers")
        for name, cost in sorted(costs.items(), key=lambda each: -each[1].cpu):
            terminalreporter.write_line(f"{_row(cost)} {name}")


def _row(cost: Cost) -> str:
    spent = f"{cost.wall:>7.1f} {cost.cpu:>7.1f} {cost.own:>7.1f} {cost.children:>9.1f} {cost.servers:>9.1f}"
    return f"{cost.tests:>5} {spent}"


def _children_seconds() -> float:
    """Of processes that this one has started, also of those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(map(_seconds, psutil.Process().children(recursive=True)))


def _server_seconds() -> float:
    parent = psutil.Process().parent()
    if parent is None or RUNNER not in " ".join(parent.cmdline()):
        return 0.0
    servers = [child for child in parent.children() if child.pid != os.getpid()]
    return sum(_seconds(each) for server in servers for each in [server, *server.children(recursive=True)])


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
