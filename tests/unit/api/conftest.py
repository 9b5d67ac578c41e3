from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from airflow.api_fastapi.app import _AuthManagerState
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.core_api.security import get_user
from airflow.models import Connection
from airflow.models.dag import DagModel
from fastapi import FastAPI
from fastapi.testclient import TestClient

from airflow_delay_provider.api import airflow_tasks
from airflow_delay_provider.api.app import create_app
from tests.selective_auth import SelectiveAuthManager

Become = Callable[[str], None]
#: Its ledgers are closed after each test.
_create_app = cache(create_app)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, delay_connection: str) -> FastAPI:
    monkeypatch.setattr(_AuthManagerState, "instance", SelectiveAuthManager())
    # Teams, and the state of tasks, are in Airflow's database, which these tests do without.
    monkeypatch.setattr(DagModel, "get_team_name", lambda _dag_id: None)
    monkeypatch.setattr(Connection, "get_team_name", lambda _conn_id: None)
    monkeypatch.setattr(airflow_tasks, "is_deferred", lambda _origin: False)
    monkeypatch.setattr(airflow_tasks, "read_histories", lambda _origins: {})
    return _create_app()


@pytest.fixture
def become(app: FastAPI) -> Become:
    """Sign in with a role."""

    def sign_in(role: str) -> None:
        app.dependency_overrides[get_user] = lambda: SimpleAuthManagerUser(username=f"the {role}", role=role)

    return sign_in


@pytest.fixture
def client(app: FastAPI, become: Become) -> Iterator[TestClient]:
    """A client of an administrator, which sends the header that changes need."""
    become("admin")
    with TestClient(app, headers={"X-Requested-With": "tests"}) as opened:
        yield opened


@pytest.fixture
def get(client: TestClient) -> Callable[..., Any]:
    """Get a path of the API, which must succeed, and return its JSON."""

    def get_json(path: str, **query: Any) -> Any:
        answer = client.get(f"/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return get_json


@pytest.fixture
def act(client: TestClient) -> Callable[..., Any]:
    """Perform an action, which must succeed, and return its JSON."""

    def post_json(action: str, **body: Any) -> Any:
        answer = client.post(f"/v1/actions/{action}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post_json
