"""Servers that tests are given by environment variables; a missing one skips its tests, and fails them on CI."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def require_server(variable: str, what: str) -> str:
    """Return the address in ``variable``."""
    url = os.environ.get(variable)
    if url:
        return url
    do_without(f"{variable} is not set: no {what} to test with")


def do_without(reason: str) -> NoReturn:
    """Skip the test; on CI, where everything can be had, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
