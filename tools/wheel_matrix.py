"""``python -m tools.wheel_matrix``: installs the wheel alone, with each extra, on each Python, and uses it.

Each combination gets a new environment with the newest versions that the wheel allows, not those of constraints.txt.
There a DAG is parsed, a message is scheduled, dispatched and received, and with Spark a job with a Python UDF runs.
The table at the end names what each combination did; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ("", "postgres", "rabbitmq", "kafka", "spark", "all")
#: Where pyenv and others put interpreters that are not on the path.
FURTHER_PYTHONS = (Path.home() / ".pyenv" / "versions",)

USE = """
import os, sys
from datetime import timedelta

extra = sys.argv[1]
from airflow.sdk import DAG
from airflow_delay_provider import DelayHook, ScheduleMessageOperator

with DAG("reminders", schedule=None) as dag:
    ScheduleMessageOperator(task_id="remind", channel="reminders", payload="hi", deliver_after=timedelta(days=3))
did = ["DAG"]

from airflow_delay_provider.testing.kit import DelayTestKit

kit = DelayTestKit()
kit.broker.schedule([DelayHook().compose("reminders", "hi", deliver_after=60)])
kit.advance(timedelta(seconds=61))
assert [message.payload for message in kit.received("reminders")] == [b"hi"]
did.append("message")

if extra in ("rabbitmq", "all"):
    import airflow_delay_provider.brokers.rabbitmq.broker, airflow_delay_provider.brokers.rabbitmq.management
    did.append("RabbitMQ client")
if extra in ("kafka", "all"):
    import airflow_delay_provider.brokers.kafka.broker
    did.append("Kafka client")
if extra in ("postgres", "all"):
    import psycopg
    did.append("PostgreSQL client")
if extra in ("spark", "all"):
    import pyspark
    from importlib.metadata import version
    from airflow_delay_provider import SparkSubmitRetryOperator
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import udf

    assert version("pyspark") == version("pyspark-client") == pyspark.__version__, "files of two versions are mixed"
    with DAG("job", schedule=None):
        SparkSubmitRetryOperator(task_id="job", application="job.py")
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    doubled = udf(lambda number: number * 2, "long")
    assert [row[0] for row in spark.range(3).select(doubled("id")).collect()] == [0, 2, 4]
    spark.stop()
    did.append(f"job on Spark {pyspark.__version__}")
print("DID " + ", ".join(did))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this version; can be repeated")
    parser.add_argument("--extra", action="append", choices=EXTRAS, help="only this extra; can be repeated")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="delay-wheel-") as scratch:
        wheel = build(Path(scratch))
        print("| Python | extra | result | seconds |\n|---|---|---|---|", flush=True)
        for version in options.python or PYTHONS:
            python = find_python(version)
            for extra in options.extra or EXTRAS:
                begin = time.monotonic()
                result = "not run: this Python is missing" if python is None else use(wheel, python, extra)
                failed |= python is not None and not result.startswith("DID")
                shown = result.removeprefix("DID ")
                print(f"| {version} | {extra or '-'} | {shown} | {time.monotonic() - begin:.0f} |", flush=True)
    return int(failed)


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def find_python(version: str) -> Path | None:
    """Return an interpreter of this version that runs."""
    return next((found for found in _candidates(version) if _is(found, version)), None)


def _candidates(version: str) -> Iterator[Path]:
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    for folder in FURTHER_PYTHONS:
        yield from sorted(folder.glob(f"{version}.*/bin/python"))


def _is(python: Path, version: str) -> bool:
    code = f"import sys; sys.exit('.'.join(map(str, sys.version_info[:2])) != {version!r})"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def use(wheel: Path, python: Path, extra: str) -> str:
    """Install and use the wheel; return what it did, or the last line of the error."""
    with tempfile.TemporaryDirectory(prefix="delay-wheel-") as scratch:
        folder = Path(scratch)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHON"))}
        # As in an activated environment: Spark's workers run the first python3 of the path.
        path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment |= {"AIRFLOW_HOME": str(folder / "airflow"), "SPARK_LOCAL_IP": "127.0.0.1", "PATH": path}
        wanted = f"airflow-delay-provider[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        (folder / "use.py").write_text(USE)
        venv = folder / "venv"
        commands: list[Sequence[str | Path]] = [
            [sys.executable, "-m", "uv", "venv", "--quiet", "--python", python, venv],
            [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", venv / "bin/python", wanted],
            [venv / "bin/python", "use.py", extra],
        ]
        for command in commands:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                lines = (done.stderr or done.stdout).strip().splitlines()
                return f"failed: {lines[-1] if lines else done.returncode}"
        return next(line for line in done.stdout.splitlines() if line.startswith("DID"))


if __name__ == "__main__":
    sys.exit(main())
