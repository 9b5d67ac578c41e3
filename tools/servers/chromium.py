"""The browser of the tests: a program that each of them starts, not a server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Playwright

from tools.servers import process
from tools.servers.server import UnavailableError


class Chromium:
    """Debian's Chromium; Playwright's own browsers are not downloaded."""

    name = "chromium"
    variable = "DELAY_TEST_CHROMIUM"

    def __init__(self) -> None:
        self.program = ""

    def start(self, run_dir: Path) -> None:  # noqa: ARG002 - it needs no folder
        self.program = find_chromium(instead=f"or set {self.variable}")

    def env(self) -> dict[str, str]:
        return {self.variable: self.program}

    def stop(self) -> None:
        """Nothing runs."""


def find_chromium(*, instead: str) -> str:
    """Return the path of the program, installed if necessary."""
    found = shutil.which("chromium")
    if found is None and process.apt_install("chromium"):
        found = shutil.which("chromium")
    if found is None:
        raise UnavailableError(f"no Chromium here: apt-get install chromium, {instead}")
    return found


@contextmanager
def launch(playwright: Playwright, program: str) -> Iterator[Browser]:
    """A browser without a window."""
    # Chromium refuses to start its sandbox as root.
    browser = playwright.chromium.launch(executable_path=program, chromium_sandbox=os.geteuid() != 0)
    try:
        yield browser
    finally:
        browser.close()
