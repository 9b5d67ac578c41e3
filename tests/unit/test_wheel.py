"""The wheel alone is enough: no file is missing in it, and a DAG can import the public names from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_delay_provider"

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
    """Built without isolation: hatchling is a development dependency, so no network is needed."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    here = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
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
