"""The wheel alone is enough: no file is missing in it, and a DAG can import the public names from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "airflow_delay_provider", ROOT / "pyspark_delay")

DAG_FILE = """
from datetime import timedelta
from airflow.sdk import DAG
import airflow_delay_provider
from airflow_delay_provider import ScheduleMessageOperator

with DAG(dag_id="reminders") as dag:
    ScheduleMessageOperator(task_id="remind", channel="reminders", payload="hi", deliver_after=timedelta(days=3))

print(airflow_delay_provider.__file__, type(dag.get_task("remind")).__module__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


def build(folder: Path) -> Path:
    """Build without isolation: hatchling is a development dependency, so no network is needed."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [built] = folder.glob("*.whl")
    return built


def metadata_of(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_a_release_has_urls_and_absolute_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Package indexes show the README where relative links lead nowhere."""
    monkeypatch.setenv("DELAY_PROJECT_URL", "https://git.example/owner/name/")
    described = metadata_of(build(tmp_path))
    assert "Homepage, https://git.example/owner/name" in described.get_all("Project-URL", [])
    text = described.get_payload()
    assert "(https://git.example/owner/name/raw/v0.1.0/docs/message.svg)" in text
    assert "(https://git.example/owner/name/blob/v0.1.0/docs/rabbitmq.md)" in text
    assert re.findall(r"\]\((?!https:)[^)]*\)", text) == []


def test_a_wheel_of_a_checkout_keeps_the_readme_as_it_is(wheel: Path) -> None:
    described = metadata_of(wheel)
    assert described.get_payload() == (ROOT / "README.md").read_text()
    assert described.get_all("Project-URL") is None


def test_the_two_packages_that_share_files_have_one_version(wheel: Path) -> None:
    required = metadata_of(wheel).get_all("Requires-Dist", [])
    for extra in ("spark", "all"):
        pins = [each for each in required if each.startswith("pyspark") and f"extra == '{extra}'" in each]
        assert len(pins) == 2
        assert len({pin.partition("==")[2].partition(";")[0] for pin in pins}) == 1


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    here = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == here


def test_a_dag_imports_public_names_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """M8: Airflow and the other dependencies come from this environment, the package from the wheel."""
    installed, elsewhere = tmp_path / "installed", tmp_path / "dags"
    elsewhere.mkdir()
    with ZipFile(wheel) as archive:
        # A wheel without compiled code is installed by unpacking it.
        archive.extractall(installed)
    dag_file = elsewhere / "reminders.py"
    dag_file.write_text(DAG_FILE)
    environment = {**os.environ, "PYTHONPATH": str(installed), "AIRFLOW_HOME": str(tmp_path / "airflow")}
    done = subprocess.run(
        [sys.executable, str(dag_file)], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    file, module = done.stdout.split()[-2:]
    assert Path(file) == installed / "airflow_delay_provider" / "__init__.py"
    assert module == "airflow_delay_provider.operators.schedule"
