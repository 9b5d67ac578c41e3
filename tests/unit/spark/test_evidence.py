"""What the exceptions of the Spark provider tell; the provider itself raises them wherever that needs no cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk.exceptions import AirflowException

from airflow_delay_provider.spark.failures import Evidence
from airflow_delay_provider.spark.failures.classifier import evidence_of
from tests.unit.spark.answering import answering


def submit(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> AirflowException:
    """Return what the provider raises when its spark-submit is ``script``."""
    monkeypatch.setenv("AIRFLOW_CONN_HERE", "spark://local")
    binary = folder / "spark-submit"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    hook = SparkSubmitHook(conn_id="here", spark_binary=str(binary), application_args=["Connection refused. "])
    with pytest.raises(AirflowException) as raised:
        hook.submit("job.py")
    hook._submit_sp.stdout.close()  # the provider leaves it to the end of the process
    return raised.value


def test_exit_code_and_tail_are_read_and_the_command_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = submit(tmp_path, monkeypatch, "echo starting; echo 'KeyError: 7' >&2; exit 7")
    assert "Connection refused" in str(error)
    assert evidence_of(error) == Evidence(
        exit_code=7, exception="AirflowException: Error code is: 7.", output=["starting", "KeyError: 7"]
    )


def test_a_killed_spark_submit_shows_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = submit(tmp_path, monkeypatch, "kill -9 $$")
    assert evidence_of(error) == Evidence(exit_code=-9, exception="AirflowException: Error code is: -9.", output=[])


def test_the_diagnostics_of_yarn_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    application = "application_1_0001"
    app = {"state": "FINISHED", "finalStatus": "FAILED", "diagnostics": "AM Container exited\nwith exitCode: -103"}
    with answering({f"/ws/v1/cluster/apps/{application}": {"app": app}}) as manager:
        connection = {
            "conn_type": "spark",
            "host": "yarn",
            "extra": {"deploy-mode": "cluster", "yarn_resourcemanager_webapp_address": manager},
        }
        monkeypatch.setenv("AIRFLOW_CONN_HERE", json.dumps(connection))
        hook = SparkSubmitHook(conn_id="here", yarn_track_via_rm_api=True)
        with pytest.raises(RuntimeError) as raised:
            hook._start_yarn_application_status_tracking(application)
    evidence = evidence_of(raised.value)
    assert evidence.diagnostics == "AM Container exited\nwith exitCode: -103"
    assert evidence.exit_code is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Driver driver-2026-0001 exited with status FAILED", {"driver_state": "FAILED"}),
        (
            "Spark application a failed (phase=Failed exit_code=137 reason=OOMKilled)",
            {"exit_code": 137, "pod_reason": "OOMKilled"},
        ),
        ("Spark application a failed (phase=Failed exit_code=1 reason=None)", {"exit_code": 1}),
        ("Spark application a failed (phase=Failed)", {}),
        ("Cannot execute: x. Error code is: 1. Kubernetes spark exit code is: 143", {"exit_code": 143}),
        ("Cannot execute: x. Error code is: 1. Kubernetes spark exit code is: None", {"exit_code": 1}),
        ("No driver id is known: something went wrong\nLast spark-submit output:\na\nb", {"output": ["a", "b"]}),
    ],
)
def test_states_of_drivers_and_pods_are_read(text: str, expected: dict[str, object]) -> None:
    evidence = evidence_of(RuntimeError(text))
    seen = {name: getattr(evidence, name) for name in Evidence.__slots__ if name != "exception"}
    nothing = {name: getattr(Evidence(), name) for name in seen} | {"output": []}
    assert seen == nothing | expected


def test_the_chain_of_causes_ends_with_its_root() -> None:
    error = RuntimeError("Giving up")
    error.__cause__ = ConnectionError("refused")
    assert evidence_of(error).exception == "RuntimeError: Giving up\nCaused by: ConnectionError: refused"


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert evidence_of(one).exception == "ValueError: one\nCaused by: ValueError: other"


def test_evidence_that_an_exception_of_the_chain_carries_is_all_that_counts() -> None:
    evidence = Evidence(exit_code=137, output=["all", "of", "it"])
    failed = RuntimeError("Error code is: 1.")
    failed.evidence = evidence  # type: ignore[attr-defined]
    wrapper = ValueError("wrapped")
    wrapper.__cause__ = failed
    assert evidence_of(wrapper) is evidence
