"""Print the steps of the demo with the time since its start."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.markup import escape

#: Width of tables without a terminal.
WIDTH = 120


class Report:
    """Prints each step when it happens."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        self._console.print(f"[dim]{self._elapsed():6.1f} s[/dim]  {escape(text)}")

    def show(self, thing: Any) -> None:
        self._console.print(escape(thing) if isinstance(thing, str) else thing)

    def fail(self, reason: str) -> None:
        self._errors.print(f"[dim]{self._elapsed():6.1f} s[/dim]  [bold red]failed:[/bold red] {escape(reason)}")

    def _elapsed(self) -> float:
        return time.monotonic() - self._began
