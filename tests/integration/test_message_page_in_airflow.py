"""The page of a message in a real api-server: which users are admitted, and what they see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.links import message_url
from tests.selective_auth import CLOSED_DAG, OPEN_DAG
from tools.servers.process import dies_with_parent, free_port, stop, wait_until

REPOSITORY = Path(__file__).parents[2]
AIRFLOW = (sys.executable, "-m", "airflow")
PASSWORDS = {"admin": "for-admins", "viewer": "for-viewers"}
ATTACK = "<script>alert(1)</script>"


@dataclass(frozen=True, kw_only=True)
class ApiServer:
    """A running api-server."""

    base_url: str
    ledger_url: str
    folder: Path

    def token(self, user: str) -> str:
        form = {"username": user, "password": PASSWORDS[user]}
        answer = httpx.post(f"{self.base_url}/auth/token", json=form, timeout=60)
        token: str = answer.raise_for_status().json()["access_token"]
        return token

    def client(self, user: str | None) -> httpx.Client:
        headers = {} if user is None else {"Authorization": f"Bearer {self.token(user)}"}
        return httpx.Client(headers=headers, timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An api-server on SQLite, served under a path of its own as behind a shared proxy."""
    folder = tmp_path_factory.mktemp("airflow")
    port = free_port()
    running = ApiServer(
        base_url=f"http://127.0.0.1:{port}/team-a", ledger_url=f"sqlite:///{folder / 'delay.db'}", folder=folder
    )
    (folder / "passwords.json").write_text(json.dumps(PASSWORDS))
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__API__BASE_URL": running.base_url,
        "AIRFLOW__API_AUTH__JWT_SECRET": "x" * 64,
        "AIRFLOW__CORE__AUTH_MANAGER": "tests.selective_auth.SelectiveAuthManager",
        "AIRFLOW__CORE__FERNET_KEY": "",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,viewer:viewer",
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


@pytest.fixture
def broker(server: ApiServer) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(Ledger(server.ledger_url)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _same_base_url(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", server.base_url)


def schedule(broker: EmbeddedBroker, **fields: Any) -> str:
    message = Message(
        **{"channel": "invoices", "payload": b"", "deliver_at": broker.clock.now() + timedelta(hours=1)} | fields
    )
    broker.schedule([message])
    return message_url(message.id)


def test_a_message_is_shown_only_after_signing_in(server: ApiServer, broker: EmbeddedBroker) -> None:
    link = schedule(broker, payload=b"top secret", content_type="text/plain")
    with server.client(None) as client:
        for address in (link, message_url("unknown")):
            page = client.get(address)
            assert page.status_code == 401
            assert "top secret" not in page.text
        sign_in = page.text.split('class="button" href="')[1].split('"')[0]
        redirect = client.get(httpx.URL(server.base_url).join(sign_in))
        assert redirect.status_code == 307
        assert "/team-a/auth/login?next=%2Fteam-a%2Fdelay%2Fmessages%2Funknown" in redirect.headers["location"]


def test_the_cookie_of_the_browser_is_enough(server: ApiServer, broker: EmbeddedBroker) -> None:
    link = schedule(broker)
    assert httpx.get(link, cookies={"_token": server.token("viewer")}, timeout=60).status_code == 200
    assert httpx.get(link, cookies={"_token": "forged"}, timeout=60).status_code == 403


@pytest.mark.parametrize("user", ["admin", "viewer"])
def test_users_who_may_read_plugins_see_a_message_without_origin(
    server: ApiServer, broker: EmbeddedBroker, user: str
) -> None:
    link = schedule(broker)
    with server.client(user) as client:
        page = client.get(link)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "Not scheduled by a task" in page.text
        assert (
            "No dispatcher has ever been seen in this ledger; start one with `airflow delay dispatcher`." in page.text
        )
        assert client.post(link).status_code == 405


def test_a_message_of_a_task_is_shown_to_users_who_may_read_its_dag(server: ApiServer, broker: EmbeddedBroker) -> None:
    links = [
        schedule(broker, origin=Origin(dag_id=dag_id, run_id="manual__1", task_id="remind"))
        for dag_id in (OPEN_DAG, CLOSED_DAG)
    ]
    with server.client("viewer") as viewer, server.client("admin") as admin:
        assert [viewer.get(link).status_code for link in links] == [200, 403]
        assert [admin.get(link).status_code for link in links] == [200, 200]
        page = viewer.get(links[0]).text
    assert f'href="/team-a/dags/{OPEN_DAG}/runs/manual__1/tasks/remind"' in page


def test_an_unknown_message_is_not_found(server: ApiServer) -> None:
    with server.client("viewer") as client:
        page = client.get(message_url("nobody/knows it"))
    assert page.status_code == 404
    assert "has no message &#39;nobody/knows it&#39;" in page.text


def test_nothing_a_message_contains_becomes_markup(server: ApiServer, broker: EmbeddedBroker) -> None:
    link = schedule(
        broker,
        id=f"{ATTACK}-{os.urandom(4).hex()}",
        payload=ATTACK.encode(),
        content_type="text/html",
        key=ATTACK,
        headers={ATTACK: ATTACK},
    )
    with server.client("viewer") as client:
        page = client.get(link)
    assert page.status_code == 200
    assert "<script" not in page.text
    assert page.text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 5
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_a_connection_in_airflows_database_has_its_own_ledger(server: ApiServer) -> None:
    url = f"sqlite:///{server.folder / 'other.db'}"
    with EmbeddedBroker(Ledger(url)) as other, server.client("admin") as admin, server.client("viewer") as viewer:
        link = schedule(other)
        answer = admin.post(
            f"{server.base_url}/api/v2/connections",
            json={"connection_id": "delay_other", "conn_type": "delay", "extra": json.dumps({"ledger_url": url})},
        )
        assert answer.status_code == 201, answer.text
        assert viewer.get(link).status_code == 404
        assert viewer.get(link, params={"conn_id": "delay_other"}).status_code == 200
        assert viewer.get(link, params={"conn_id": "delay_missing"}).status_code == 404


def test_airflow_lists_the_plugin(server: ApiServer) -> None:
    with server.client("admin") as client:
        plugins = client.get(f"{server.base_url}/api/v2/plugins").json()["plugins"]
        errors = client.get(f"{server.base_url}/api/v2/plugins/importErrors").json()
    [ours] = [plugin for plugin in plugins if plugin["name"] == "delay"]
    assert [app["url_prefix"] for app in ours["fastapi_apps"]] == ["/delay"]
    assert errors["total_entries"] == 0


def _answers(server: ApiServer) -> bool:
    try:
        return httpx.get(f"{server.base_url}/api/v2/version", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
