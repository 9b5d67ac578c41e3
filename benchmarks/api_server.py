"""The HTTP API as it runs in production: uvicorn in a process of its own, and a client with a signed token.

Airflow verifies the token and the access rights in each request, and uses a database of its own. What is missing of an
API server are Airflow's own routes and middleware, which cost the same at any number of messages.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from benchmarks.measurement import MismatchError

if TYPE_CHECKING:
    from fastapi import FastAPI

READY_SECONDS = 180.0
STOP_SECONDS = 30.0
_TOKEN_VARIABLE = "DELAY_BENCH_TOKEN_FILE"


def create() -> FastAPI:
    """Return the application with Airflow's tables and access rights; uvicorn calls it in its own process."""
    from airflow import settings
    from airflow.api_fastapi.app import init_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from airflow.models import import_all_models
    from airflow.models.base import Base

    from airflow_delay_provider.api.app import create_app

    import_all_models()  # type: ignore[no-untyped-call]  # Airflow's own
    Base.metadata.create_all(settings.engine)
    app = create_app()
    token = init_auth_manager(app).generate_jwt(SimpleAuthManagerUser(username="bench", role="admin"))
    Path(os.environ[_TOKEN_VARIABLE]).write_text(token)
    return app


class Client:
    """One connection to the server that stays open."""

    def __init__(self, port: int, token: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_SECONDS)
        self._headers = {"Authorization": f"Bearer {token}"}

    def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """Return the body of a successful answer."""
        target = f"/v1/{path}?{urlencode(query)}"
        self._connection.request("GET", target, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise MismatchError(f"GET {target}: {answer.status} {body.decode()}")
        return body

    def get_json(self, path: str, query: Mapping[str, str]) -> Any:
        """Return the parsed answer."""
        return json.loads(self.get(path, query))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextmanager
def serve(ledgers: Mapping[str, str]) -> Iterator[Client]:
    """Run the API on these ledgers, by the id of their connection, and yield a client of an administrator."""
    with tempfile.TemporaryDirectory(prefix="delay-bench-api-") as folder:
        token, log = Path(folder) / "token", Path(folder) / "log"
        # It says in its log on which free port it answers. A socket that it inherits would be without TCP_NODELAY,
        # and each answer 40 ms later.
        command = [sys.executable, "-m", "uvicorn", "--factory", "benchmarks.api_server:create"]
        command += ["--port", "0", "--no-access-log"]
        environment = os.environ | _environment(Path(folder), ledgers) | {_TOKEN_VARIABLE: str(token)}
        with log.open("w") as writing:
            process = subprocess.Popen(command, stdout=writing, stderr=writing, env=environment)
            try:
                with closing(Client(_wait_for_port(process, log), token.read_text())) as client:
                    yield client
            finally:
                process.terminate()
                process.wait(STOP_SECONDS)


def _environment(folder: Path, ledgers: Mapping[str, str]) -> dict[str, str]:
    connections = {
        f"AIRFLOW_CONN_{conn_id.upper()}": json.dumps({"conn_type": "delay", "extra": {"ledger_url": url}})
        for conn_id, url in ledgers.items()
    }
    return connections | {
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder}/airflow.db",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__API_AUTH__JWT_SECRET": os.urandom(32).hex(),
    }


def _wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + READY_SECONDS
    while (said := re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise MismatchError(f"the API server did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return int(said[1])
