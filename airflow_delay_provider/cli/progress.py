"""How far a long command is: a bar on a terminal, a line now and then elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 5.0

#: Called with the number of lines that are done.
Report = Callable[[int], None]


@contextmanager
def progress(doing: str, *, total: int | None = None) -> Iterator[Report]:
    """Show progress while the block runs."""
    with _bar(doing, total) if sys.stderr.isatty() else _lines(doing, total) as report:
        yield report


@contextmanager
def _bar(doing: str, total: int | None) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _lines(doing: str, total: int | None) -> Iterator[Report]:
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            sys.stderr.write(f"{doing}: {done}{'' if total is None else f' of {total}'} lines\n")

    yield report
