"""The one sentence with which each job ends, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_delay_provider.domain.exceptions import BrokerError, ConfigurationError, InvalidMessageError
from airflow_delay_provider.spark.jobs.command import ExitCode, JobError, known_problem, run_command

#: As Spark quotes the error of its own Python processes.
OF_AN_EXECUTOR = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "writer.py", line 1, in write
airflow_delay_provider.domain.exceptions.{name}: the broker at rabbit.example does not answer; check it
SQLSTATE: 38000"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("connection: is not defined; define it"), ExitCode.USAGE),
        (InvalidMessageError("channel", "is empty", "name one"), ExitCode.USAGE),
        (BrokerError("the broker at rabbit.example does not answer; check it"), ExitCode.FAILED),
        (RuntimeError(OF_AN_EXECUTOR.format(name="BrokerError")), ExitCode.FAILED),
        (RuntimeError(OF_AN_EXECUTOR.format(name="ConfigurationError")), ExitCode.USAGE),
    ],
)
def test_a_known_problem_is_one_sentence_and_says_whether_to_correct_or_to_repeat(
    error: Exception, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert run_command("lateness", fail) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("lateness: failed: " if code is ExitCode.FAILED else "lateness: error: ")
    assert "; " in line


def test_an_unknown_problem_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a mistake of ours")

    assert known_problem(ZeroDivisionError()) is None
    assert run_command("lateness", fail) == ExitCode.FAILED
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1] == "lateness: failed: ZeroDivisionError; see the traceback above"


def test_success_and_interruption_have_their_codes() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def reject() -> None:
        raise JobError("2 rows were rejected", code=ExitCode.REJECTS)

    assert run_command("bulk_schedule", lambda: None) == 0
    assert run_command("bulk_schedule", interrupt) == 130
    assert run_command("bulk_schedule", reject) == 3


@pytest.mark.parametrize(
    ("job", "arguments"),
    [
        ("bulk_schedule", ["--input", "rows.parquet"]),
        ("lateness", ["--output", "here"]),
        ("dispatch", ["--connection", "ladder", "--checkpoint", "here"]),
    ],
)
def test_without_java_each_job_says_what_to_install(job: str, arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    ended = subprocess.run(
        [sys.executable, "-m", f"airflow_delay_provider.spark.jobs.{job}", *arguments],
        env={
            **os.environ,
            "PATH": str(tmp_path),
            "JAVA_HOME": "",
            "AIRFLOW_CONN_LADDER": '{"conn_type": "delay_kafka", "host": "127.0.0.1:1"}',
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == ExitCode.USAGE
    sentence = f"{job}: error: Java: Spark did not start, as no Java is found or it is too old; install Java 17"
    assert ended.stderr.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in ended.stderr
