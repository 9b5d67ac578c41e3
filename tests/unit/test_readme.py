"""The README is true: its DAG runs, its commands and its links exist."""

from __future__ import annotations

import re
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_delay_provider.testing.kit import DelayTestKit
from airflow_delay_provider.testing.task_run import TaskRun

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


def test_the_dag_of_the_readme_delivers_its_message(delay_kit: DelayTestKit, delay_connection: str) -> None:
    """A21, B51"""
    [snippet] = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet.replace("):\n", ") as dag:\n", 1), "README.md", "exec"), names)
    [task] = names["dag"].tasks
    TaskRun(task)
    delay_kit.advance(timedelta(days=3) - timedelta(milliseconds=1))
    assert delay_kit.received("reminders") == []
    delay_kit.advance(timedelta(milliseconds=1))
    assert len(delay_kit.received("reminders")) == 1


def test_the_commands_of_the_readme_exist() -> None:
    shown = set(re.findall(r"`\./dev (\w+)", TEXT))
    help_text = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, check=True).stdout
    assert shown == {"demo", "test", "up", "bench", "lint"}
    assert all(re.search(rf"\b{name}\b", help_text) for name in shown)


@pytest.mark.parametrize("page", [page for page in PAGES if "template" not in page])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (ROOT / page).read_text())
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []
