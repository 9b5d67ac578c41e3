"""The built-in ledger is a file of one machine, and is refused where no dispatcher would see its messages."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.executors.base_executor import BaseExecutor
from airflow.executors.local_executor import LocalExecutor
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.supervisor import InProcessSupervisorComms

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.hooks.delay import DelayHook
from tests.heartbeats import write_heartbeat

HERE = __name__
#: Of the documentation: no machine has it.
ANOTHER_MACHINE = "http://192.0.2.1:8080/execution/"


class AtHome(LocalExecutor):
    """An executor of one's own that runs tasks on the scheduler's machine."""


class FarAway(BaseExecutor):
    """An executor of one's own that runs tasks elsewhere."""


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The built-in ledger of an Airflow in which nothing is configured."""
    monkeypatch.delenv("AIRFLOW__DELAY__LEDGER_URL", raising=False)
    monkeypatch.delenv("AIRFLOW_CONN_DELAY_DEFAULT", raising=False)
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    return tmp_path / "delay.db"


class Supervisor:
    """What a task finds in a worker: it says that no connection is defined."""

    def send(self, _request: Any) -> Any:
        from airflow.sdk.exceptions import ErrorType
        from airflow.sdk.execution_time.comms import ErrorResponse

        return ErrorResponse(error=ErrorType.CONNECTION_NOT_FOUND)


def schedule(conn_id: str = "delay_default", **options: Any) -> None:
    with closing(DelayHook(conn_id, **options)) as hook:
        hook.schedule([hook.compose("orders", b"", deliver_after=timedelta(hours=1))])


@pytest.mark.parametrize(
    "executor",
    [
        "CeleryExecutor",
        "KubernetesExecutor",
        "airflow.providers.edge3.executors.EdgeExecutor",
        "LocalExecutor,CeleryExecutor",
        "LocalExecutor,far:CeleryExecutor",
        f"{HERE}.FarAway",
        "not.installed.here.Executor",
    ],
)
def test_an_executor_that_runs_tasks_elsewhere_refuses_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """A12"""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    with pytest.raises(
        ConfigurationError, match=r"set \[delay\] ledger_url to a PostgreSQL database that all machines"
    ):
        schedule()
    assert not file.exists()


@pytest.mark.parametrize("executor", ["LocalExecutor", f"{HERE}.AtHome", f"home:{HERE}.AtHome", "=LocalExecutor"])
def test_an_executor_on_one_machine_needs_no_settings(
    file: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """A21"""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", executor)
    schedule()
    assert file.exists()


def test_a_team_with_an_executor_elsewhere_counts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor;sales=CeleryExecutor")
    schedule()
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
    with pytest.raises(ConfigurationError, match="CeleryExecutor runs tasks on other machines"):
        schedule()


def test_a_ledger_that_was_configured_is_not_questioned(
    file: Path, monkeypatch: pytest.MonkeyPatch, sqlite_url: str
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", sqlite_url)
    schedule()
    assert not file.exists()


def test_messages_that_the_ledger_holds_for_another_broker_are_refused_too(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT", '{"conn_type": "rabbitmq", "host": "127.0.0.1"}')
    with pytest.raises(ConfigurationError, match="CeleryExecutor runs tasks on other machines"):
        schedule("rabbit", hold="ledger")
    with closing(DelayHook("rabbit")) as hook:
        assert hook.get_conn(), "RabbitMQ needs no ledger for what it holds itself"


def test_a_dag_under_test_uses_no_executor(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    comms = InProcessSupervisorComms.__new__(InProcessSupervisorComms)
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", comms, raising=False)
    monkeypatch.setattr(InProcessSupervisorComms, "send", Supervisor.send)
    schedule()
    assert file.exists()


def test_a_task_whose_airflow_runs_elsewhere_needs_a_dispatcher_that_has_served_its_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one deployment have a file each."""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTION_API_SERVER_URL", ANOTHER_MACHINE)
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", Supervisor(), raising=False)
    with pytest.raises(ConfigurationError, match=r"'192.0.2.1', is another machine or container, and no dispatcher"):
        schedule()
    with closing(Ledger(f"sqlite:///{file}")) as ledger:
        write_heartbeat(ledger)
    schedule()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "a-name-that-nobody-knows.invalid"])
def test_a_task_whose_airflow_runs_here_may_come_before_the_dispatcher(
    file: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTION_API_SERVER_URL", f"http://{host}:8080/execution/")
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", Supervisor(), raising=False)
    schedule()
    assert file.exists()


def test_a_worker_process_gets_the_refusal_in_one_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12"""
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setenv("AIRFLOW_CONN_DELAY_DEFAULT", '{"conn_type": "delay"}')
    code = "from airflow_delay_provider.hooks.delay import DelayHook; print(DelayHook().test_connection())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "(False, 'ledger_url: is not set, so messages would be stored in sqlite:///" in done.stdout, done.stderr
    assert not file.exists()
