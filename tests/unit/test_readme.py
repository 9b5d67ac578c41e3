"""README and docs are true: the DAG runs, commands, names, files and headings that they mention exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import airflow_delay_provider
from airflow_delay_provider.testing.kit import DelayTestKit
from airflow_delay_provider.testing.task_run import TaskRun

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PAGES = sorted(str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_dag_of_the_readme_delivers_its_message(delay_kit: DelayTestKit, delay_connection: str) -> None:
    """M7, A21, B51"""
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
    shown = set(re.findall(r"^\./dev (\w+)|`\./dev (\w+)", TEXT, flags=re.MULTILINE))
    names = {name for pair in shown for name in pair if name}
    help_text = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, check=True).stdout
    assert names == {"demo", "test", "up", "bench", "lint"}
    assert all(re.search(rf"^\./dev {name}\b", help_text, flags=re.MULTILINE) for name in names)


def test_the_airflow_commands_of_the_readme_are_accepted() -> None:
    from tests.unit.cli.commandline import parser

    shown = re.findall(r"^airflow delay (.*)$", TEXT, flags=re.MULTILINE)
    assert len(shown) >= 3
    for words in shown:
        parser().parse_args(["delay", *shlex.split(words, comments=True)])


def test_the_classes_of_the_readme_are_public() -> None:
    named = set(re.findall(r"`(\w+(?:Operator|Sensor|Hook|Policy|DeferMessage))\b", TEXT))
    assert "ScheduleMessageOperator" in named
    assert named - {"SparkSubmitOperator"} <= set(airflow_delay_provider.__all__)


@pytest.mark.parametrize("page", [page for page in PAGES if "template" not in page])
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)\s]*)\)", (ROOT / page).read_text())
    assert [target for target in targets if not leads_somewhere(ROOT / page, target)] == []


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, heading = target.partition("#")
    found = page.parent / path if path else page
    return found.exists() and (not heading or heading in headings_of(found))


def headings_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


TOUR = (ROOT / "docs" / "tour.md").read_text()


def test_a_tour_has_at_most_ten_stops() -> None:
    tours = [re.findall(r"^(\d+)\. ", section, flags=re.MULTILINE) for section in TOUR.split("\n## ")[1:-1]]
    assert len(tours) == 4
    assert all(stops == [str(number) for number in range(1, len(stops) + 1)] for stops in tours)
    assert max(map(len, tours)) <= 10


@pytest.mark.parametrize("stop", re.findall(r"^\d+\. (.*)$", TOUR, flags=re.MULTILINE), ids=lambda stop: stop[:40])
def test_a_stop_of_the_tour_names_what_its_file_has(stop: str) -> None:
    path, text = re.fullmatch(r"\[`.*?`\]\(\.\./(.*?)\): (.*)", stop).groups()  # type: ignore[union-attr]
    source = (ROOT / path).read_text()
    for name in re.findall(r"`([\w.]+)`", text):
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", source), name
