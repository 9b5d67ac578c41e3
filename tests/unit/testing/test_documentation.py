from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def name_of(snippet: str) -> str:
    [name] = re.findall(r"^def (test_\w+)", snippet, flags=re.MULTILINE)
    return name


def test_the_page_shows_something():
    assert len(SNIPPETS) == PAGE.read_text().count("```python") >= 4


@pytest.mark.parametrize("snippet", SNIPPETS, ids=name_of)
def test_the_snippets_of_the_page_run(snippet: str, request: pytest.FixtureRequest):
    """A26, A38"""
    names: dict[str, Any] = {}
    exec(compile(snippet, str(PAGE), "exec"), names)
    test = names[name_of(snippet)]
    arguments = test.__code__.co_varnames[: test.__code__.co_argcount]
    test(*(request.getfixturevalue(name) for name in arguments))
