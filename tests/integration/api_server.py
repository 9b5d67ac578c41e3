"""A real api-server of Airflow that serves our HTTP API, with users of each role."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.servers.process import dies_with_parent, free_port, stop, wait_until

REPOSITORY = Path(__file__).parents[2]
AIRFLOW = (sys.executable, "-m", "airflow")
#: Users and their roles.
USERS = {"admin": "admin", "editor": "user", "viewer": "viewer"}


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """A running api-server."""

    base_url: str
    ledger_url: str
    folder: Path

    @property
    def api_url(self) -> str:
        """Where the HTTP API begins."""
        return f"{self.base_url}/delay/v1"

    def absolute(self, link: str) -> httpx.URL:
        """The URL of a path that the API returned."""
        return httpx.URL(self.base_url).join(link)

    def token(self, user: str) -> str:
        """The token of a user, who signs in with their name as password."""
        return _sign_in(self.base_url, user)

    def client(self, user: str | None) -> httpx.Client:
        """A client whose paths begin at the HTTP API; it sends the header that changes need."""
        headers = {"X-Requested-With": "tests"}
        if user is not None:
            headers["Authorization"] = f"Bearer {self.token(user)}"
        return httpx.Client(base_url=f"{self.api_url}/", headers=headers, timeout=60)

    def define(self, conn_id: str, **fields: Any) -> None:
        """Define a connection in Airflow's database, where it replaces an earlier one."""
        extra = json.dumps(fields.pop("extra", {}))
        with self.client("admin") as client:
            client.delete(f"{self.base_url}/api/v2/connections/{conn_id}")
            body = {"connection_id": conn_id, "extra": extra, **fields}
            answer = client.post(f"{self.base_url}/api/v2/connections", json=body)
        assert answer.status_code == 201, answer.text


@cache
def _sign_in(base_url: str, user: str) -> str:
    answer = httpx.post(f"{base_url}/auth/token", json={"username": user, "password": user}, timeout=60)
    token: str = answer.raise_for_status().json()["access_token"]
    return token


@contextmanager
def run_api_server(folder: Path) -> Iterator[ApiServer]:
    """Run an api-server on SQLite, under a path of its own as behind a shared proxy."""
    port = free_port()
    running = ApiServer(
        base_url=f"http://127.0.0.1:{port}/team-a", ledger_url=f"sqlite:///{folder / 'delay.db'}", folder=folder
    )
    (folder / "passwords.json").write_text(json.dumps({user: user for user in USERS}))
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__API__BASE_URL": running.base_url,
        "AIRFLOW__API_AUTH__JWT_SECRET": "x" * 64,
        "AIRFLOW__CORE__AUTH_MANAGER": "tests.selective_auth.SelectiveAuthManager",
        "AIRFLOW__CORE__FERNET_KEY": "",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{user}:{role}" for user, role in USERS.items()),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(folder / "passwords.json"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder / 'airflow.db'}",
        "AIRFLOW__DELAY__LEDGER_URL": running.ledger_url,
    }
    with (folder / "server.log").open("wb") as log:
        options: dict[str, Any] = {"env": environment, "stdout": log, "stderr": subprocess.STDOUT}
        subprocess.run([*AIRFLOW, "db", "migrate"], check=True, timeout=120, **options)
        process = subprocess.Popen(
            [*AIRFLOW, "api-server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
            **options,
        )
        try:
            if not wait_until(lambda: _answers(running), process=process, deadline_seconds=120):
                pytest.fail(f"no api-server:\n{(folder / 'server.log').read_text()[-4000:]}")
            yield running
        finally:
            stop(process, signals=[signal.SIGTERM])


def _answers(server: ApiServer) -> bool:
    try:
        return httpx.get(f"{server.base_url}/api/v2/version", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
