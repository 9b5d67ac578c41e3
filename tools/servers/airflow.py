"""A real Airflow of four components with a home of its own, for the demo and the acceptance tests."""

from __future__ import annotations

import base64
import configparser
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from airflow_delay_provider.brokers.ledger.database import Ledger
from tools.servers import process
from tools.servers.airflow_api import AirflowApi
from tools.servers.component import Component, stop_all, wait_for
from tools.servers.sessions import Guardian

MIGRATE_SECONDS = 240
START_SECONDS = 240
#: As the health report names them.
HEALTH_NAMES = ("metadatabase", "scheduler", "triggerer", "dag_processor")


@dataclass(frozen=True, kw_only=True)
class AirflowConfig:
    """What differs between one Airflow and another."""

    #: Name of a bundle to its folder.
    dags: Mapping[str, Path]
    #: Airflow's own database; None is SQLite in its home.
    database_url: str | None = None
    #: The ledger of delayed messages; None is SQLite in Airflow's home.
    ledger_url: str | None = None
    #: Tasks at once; above four the SQLite database is locked too often.
    parallelism: int = 4
    #: User (also the password) to role; empty makes everybody an administrator, without a login.
    users: Mapping[str, str] = field(default_factory=dict)
    #: Connections by id, as URI or JSON.
    connections: Mapping[str, str] = field(default_factory=dict)
    #: Where all components find further modules.
    python_path: Sequence[Path] = ()
    #: Further settings by section.
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class Airflow:
    """Starts and ends the api-server, scheduler, dag-processor and triggerer, and the dispatcher beside them."""

    def __init__(self, run_dir: Path, config: AirflowConfig) -> None:
        self.home = run_dir.resolve() / "airflow"
        self.log_dir = run_dir.resolve() / "logs"
        self.config = config
        self.url = f"http://127.0.0.1:{process.free_port()}"
        self.dispatcher_url = f"http://127.0.0.1:{process.free_port()}"
        self.ledger_url = config.ledger_url or f"sqlite:///{self.home / 'delay.db'}"
        self._guardian = Guardian()
        self.components = {
            name: self._component(name, "-m", "airflow", name)
            for name in ("api-server", "dag-processor", "triggerer", "scheduler")
        }
        self.dispatcher = self._component(
            "dispatcher",
            *("-m", "airflow_delay_provider.dispatcher", "--ledger", self.ledger_url),
            *("--health-port", str(httpx.URL(self.dispatcher_url).port)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def all_components(self) -> list[Component]:
        return [*self.components.values(), self.dispatcher]

    def env(self) -> dict[str, str]:
        """Return the environment in which the ``airflow`` command speaks of this Airflow and of no other."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
        scripts = Path(sys.executable).parent
        return inherited | {
            "AIRFLOW_HOME": str(self.home),
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, self.config.python_path)),
            "PYTHONUNBUFFERED": "1",
            **{f"AIRFLOW_CONN_{conn_id.upper()}": text for conn_id, text in self.config.connections.items()},
        }

    def prepare(self) -> None:
        """Write the configuration and create the tables."""
        self.home.mkdir(parents=True)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._write_configuration()
        self.run("airflow", "db", "migrate")
        ledger = Ledger(self.ledger_url)
        ledger.migrate()
        ledger.close()

    def start(self) -> None:
        """Start everything; return once all components report to be well."""
        for name in ("api-server", "dag-processor", "triggerer"):
            self.components[name].start()
        self.dispatcher.start()
        # A task that starts before the api-server answers fails, so the scheduler starts after it.
        self.wait_for(self._api_answers, what="the api-server answers", seconds=START_SECONDS)
        self.components["scheduler"].start()
        self.wait_until_healthy()
        self.wait_for_dispatcher()

    def wait_for_dispatcher(self) -> None:
        self.wait_for(self._dispatcher_is_well, what="the dispatcher is well", seconds=START_SECONDS)

    def wait_until_healthy(self) -> None:
        self.wait_for(self._is_healthy, what="Airflow reports that all components are healthy", seconds=START_SECONDS)

    def stop(self) -> None:
        """End all processes; the logs stay."""
        stop_all(self.all_components)
        self._guardian.stop()

    def wait_for(self, look: Any, *, what: str, seconds: float, interval: float = 0.5) -> Any:
        """Wait for what ``look`` finds while all components run."""
        return wait_for(look, what=what, seconds=seconds, components=self.all_components, interval=interval)

    def run(self, *command: str, seconds: float = MIGRATE_SECONDS) -> str:
        """Run a command in this Airflow's environment and return what it printed."""
        done = subprocess.run(
            command, env=self.env(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def api(self, user: str | None = None) -> AirflowApi:
        """Return a client for ``user``; None where everybody is an administrator."""
        return AirflowApi(self.url, user=user, password=user, wait_for=self.wait_for)

    def _component(self, name: str, *arguments: str) -> Component:
        command = [sys.executable, *arguments]
        return Component(name, command, log_dir=self.log_dir, env=self.env(), guardian=self._guardian)

    def _write_configuration(self) -> None:
        parser = configparser.RawConfigParser()
        # Airflow expands % in this file, and connection URLs may contain one.
        parser.read_dict({section: _escaped(options) for section, options in self._settings().items()})
        with (self.home / "airflow.cfg").open("w") as file:
            parser.write(file)
        (self.home / "passwords.json").write_text(json.dumps({user: user for user in self.config.users}))

    def _settings(self) -> dict[str, dict[str, str]]:
        config = self.config
        database = config.database_url or f"sqlite:///{self.home / 'airflow.db'}"
        # psycopg speaks both ways; Airflow itself finds the asynchronous driver of SQLite.
        asynchronous = {"sql_alchemy_conn_async": database} if config.database_url else {}
        settings = {
            "core": {
                "executor": "LocalExecutor",
                "parallelism": str(config.parallelism),
                "load_examples": "False",
                "fernet_key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
                "execution_api_server_url": f"{self.url}/execution/",
                "simple_auth_manager_all_admins": str(not config.users),
                "simple_auth_manager_users": ",".join(f"{user}:{role}" for user, role in config.users.items()),
                "simple_auth_manager_passwords_file": str(self.home / "passwords.json"),
            },
            "database": {"sql_alchemy_conn": database, **asynchronous},
            "api": {
                "host": "127.0.0.1",
                "port": str(httpx.URL(self.url).port),
                "base_url": self.url,
                "workers": "1",
                "secret_key": secrets.token_urlsafe(48),
            },
            "api_auth": {"jwt_secret": secrets.token_urlsafe(64)},
            "dag_processor": {"dag_bundle_config_list": json.dumps([_bundle(*each) for each in config.dags.items()])},
            "logging": {
                "base_log_folder": str(self.home / "logs"),
                "worker_log_server_port": str(process.free_port()),
                "trigger_log_server_port": str(process.free_port()),
            },
            "delay": {"ledger_url": self.ledger_url},
        }
        for section, options in config.settings.items():
            settings.setdefault(section, {}).update(options)
        return settings

    def _api_answers(self) -> bool:
        return _get(f"{self.url}/api/v2/version") is not None

    def _is_healthy(self) -> bool:
        health = _get(f"{self.url}/api/v2/monitor/health") or {}
        return all(health.get(name, {}).get("status") == "healthy" for name in HEALTH_NAMES)

    def _dispatcher_is_well(self) -> bool:
        return (_get(f"{self.dispatcher_url}/health") or {}).get("well") is True


def _get(url: str) -> Any:
    try:
        answer = httpx.get(url, timeout=10)
    except httpx.HTTPError:
        return None
    return answer.json() if answer.is_success else None


def _bundle(name: str, folder: Path) -> dict[str, Any]:
    return {
        "name": name,
        "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
        "kwargs": {"path": str(folder.resolve())},
    }


def _escaped(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value.replace("%", "%%") for name, value in options.items()}
