"""The HTTP API in a real api-server: who may do what, and messages from their schedule to their delivery."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import httpx
import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.project_journal import ProjectJournal
from airflow_delay_provider.domain.clock import SystemClock
from airflow_delay_provider.domain.message import Message, Origin
from tests.integration.api_server import ApiServer
from tests.integration.kafka_with_dispatcher import CONN_ID, stream_with_dispatcher
from tests.kafkas import connection_of as kafka_connection_of
from tests.rabbits import config_of, connection_of, declare_queue, fresh_vhost
from tests.selective_auth import CLOSED_DAG, OPEN_DAG
from tools.servers import component
from tools.servers.process import dies_with_parent, stop

wait_for = partial(component.wait_for, seconds=90, interval=0.05)
WHO = (None, "viewer", "editor", "admin")
READERS = (401, 200, 200, 200)
EDITORS = (401, 403, 200, 200)
ADMINISTRATORS = (401, 403, 403, 201)
#: Every route: the answers to an anonymous user, a viewer and an editor of a DAG, and an administrator.
MATRIX = {
    "GET /v1/me": READERS,
    "GET /v1/messages": READERS,
    "GET /v1/messages/{message_id}": READERS,
    "GET /v1/history/{message_id}": READERS,
    "GET /v1/payload/{message_id}": EDITORS,
    "GET /v1/counts": READERS,
    "GET /v1/channels": READERS,
    "GET /v1/dead-letters": READERS,
    "GET /v1/retries": READERS,
    "GET /v1/attempts": READERS,
    "GET /v1/health": READERS,
    "GET /v1/series": READERS,
    "GET /v1/upcoming": READERS,
    "GET /v1/openapi.json": READERS,
    "POST /v1/messages": ADMINISTRATORS,
    "POST /v1/channels/{channel}/messages": ADMINISTRATORS,
    "POST /v1/actions/cancel": EDITORS,
    "POST /v1/actions/expedite": EDITORS,
    "POST /v1/actions/reschedule": EDITORS,
    "POST /v1/actions/replay": EDITORS,
}
#: Routes about one task or its message: in a DAG that is closed to them, viewers and editors get 403.
OF_A_TASK = [
    route for route in MATRIX if "{message_id}" in route or "/actions/" in route or route.endswith("/attempts")
]


@pytest.fixture
def broker(api_server: ApiServer) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(Ledger(api_server.ledger_url)) as opened:
        yield opened


def schedule(broker: EmbeddedBroker, *, dag_id: str | None = None, **fields: Any) -> str:
    origin = None if dag_id is None else Origin(dag_id=dag_id, run_id="manual__1", task_id="remind")
    ours = {"channel": "invoices", "payload": b"hi", "deliver_at": broker.clock.now() + timedelta(hours=1)}
    message = Message(**ours | {"origin": origin} | fields)
    broker.schedule([message])
    return message.id


def make_dead_letter(broker: EmbeddedBroker, dag_id: str) -> str:
    channel = f"dead-{uuid4().hex}"
    message_id = schedule(broker, dag_id=dag_id, channel=channel, deliver_at=broker.clock.now() - timedelta(seconds=1))
    [delivery] = broker.receive(channel)
    broker.dead_letter(delivery, channel=f"{channel}.dead", reason="no such customer")
    return message_id


def ask(client: httpx.Client, broker: EmbeddedBroker, route: str, dag_id: str) -> int:
    """Use a route on a fresh message of a DAG's task and return the status."""
    method, path = route.split()
    given: dict[str, Any] = {}
    if path.endswith("/attempts"):
        given = {"params": {"dag_id": dag_id, "run_id": "manual__1", "task_id": "remind"}}
    elif "{message_id}" in path:
        path = path.replace("{message_id}", schedule(broker, dag_id=dag_id))
    elif "/actions/" in path:
        is_replay = path.endswith("replay")
        message_id = make_dead_letter(broker, dag_id) if is_replay else schedule(broker, dag_id=dag_id)
        given = {"json": {"ids": [message_id]} | ({"deliver_after": 60} if path.endswith("reschedule") else {})}
    elif path == "/v1/messages" and method == "POST":
        given = {"json": {"channel": "invoices", "payload": 1, "deliver_after": 60}}
    elif method == "POST":
        path, given = path.replace("{channel}", "invoices"), {"content": b"hi"}
    return client.request(method, path.removeprefix("/v1/"), **given).status_code


def test_every_route_answers_each_user_as_the_table_says(api_server: ApiServer, broker: EmbeddedBroker) -> None:
    with api_server.client("admin") as admin:
        paths = admin.get("openapi.json").json()["paths"]
    served = {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}
    assert served | {"GET /v1/openapi.json"} == set(MATRIX)
    found = {}
    closed = {}
    for user in WHO:
        with api_server.client(user) as client:
            for route in MATRIX:
                found[route, user] = ask(client, broker, route, OPEN_DAG)
            for route in OF_A_TASK:
                closed[route, user] = ask(client, broker, route, CLOSED_DAG)
    assert found == {(route, user): status for route in MATRIX for user, status in zip(WHO, MATRIX[route], strict=True)}
    assert closed == {
        (route, user): status for route in OF_A_TASK for user, status in zip(WHO, (401, 403, 403, 200), strict=True)
    }


def test_messages_without_a_task_are_changed_by_administrators_only(
    api_server: ApiServer, broker: EmbeddedBroker
) -> None:
    message_id = schedule(broker)
    for user, status in (("viewer", 403), ("editor", 403), ("admin", 200)):
        with api_server.client(user) as client:
            assert client.get(f"messages/{message_id}").status_code == 200
            assert client.post("actions/cancel", json={"ids": [message_id]}).status_code == status


def test_lists_leave_out_messages_of_closed_dags(api_server: ApiServer, broker: EmbeddedBroker) -> None:
    channel = f"listed-{uuid4().hex}"
    ids = [schedule(broker, channel=channel, dag_id=dag_id) for dag_id in (OPEN_DAG, CLOSED_DAG)]
    for user, listed in (("viewer", ids[:1]), ("editor", ids[:1]), ("admin", ids)):
        with api_server.client(user) as client:
            found = client.get("messages", params={"channel": channel}).json()["messages"]
        assert sorted(each["id"] for each in found) == sorted(listed)


# -- signing in --------------------------------------------------------------------------------------------------------


def test_anonymous_users_get_a_problem_and_the_files_of_the_ui_only(
    api_server: ApiServer, broker: EmbeddedBroker
) -> None:
    message_id = schedule(broker, payload=b"top secret", content_type="text/plain")
    with api_server.client(None) as client:
        for path in (f"messages/{message_id}", "messages/unknown", "openapi.json"):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
            assert answer.json()["detail"] == "Sign in to Airflow."
        static = client.get(f"{api_server.base_url}/delay/static/build.json")
        assert static.status_code == 200
        assert client.post(f"{api_server.base_url}/delay/static/build.json").status_code == 405


def test_the_cookie_of_the_browser_is_enough_to_read(api_server: ApiServer) -> None:
    address = f"{api_server.api_url}/me"
    assert httpx.get(address, cookies={"_token": api_server.token("viewer")}, timeout=60).json()["user"] == "viewer"
    assert httpx.get(address, cookies={"_token": "forged"}, timeout=60).status_code in (401, 403)


def test_a_page_of_another_site_changes_nothing(api_server: ApiServer, broker: EmbeddedBroker) -> None:
    message_id = schedule(broker)
    for content_type in ("text/plain", "application/json"):
        answer = httpx.post(
            f"{api_server.api_url}/actions/cancel",
            content=f'{{"ids": ["{message_id}"]}}',
            headers={"Origin": "https://evil.example", "Content-Type": content_type},
            cookies={"_token": api_server.token("admin")},
            timeout=60,
        )
        assert (answer.status_code, "X-Requested-With is missing" in answer.text) == (403, True)
    with api_server.client("admin") as client:
        assert client.get(f"messages/{message_id}").json()["state"] == "SCHEDULED"


def test_links_begin_with_the_path_of_the_server(api_server: ApiServer, broker: EmbeddedBroker) -> None:
    message_id = schedule(broker, dag_id=OPEN_DAG)
    with api_server.client("viewer") as client:
        found = client.get(f"messages/{message_id}").json()
        assert client.get(api_server.absolute(found["link"])).status_code == 200
    assert found["link"] == f"/team-a/delay/v1/messages/{message_id}"
    assert found["task_link"] == f"/team-a/dags/{OPEN_DAG}/runs/manual__1/tasks/remind"


def test_a_connection_in_airflows_database_has_its_own_ledger(api_server: ApiServer) -> None:
    url = f"sqlite:///{api_server.folder / 'other.db'}"
    api_server.define("delay_other", conn_type="delay", extra={"ledger_url": url})
    with EmbeddedBroker(Ledger(url)) as other, api_server.client("viewer") as viewer:
        path = f"messages/{schedule(other)}"
        assert viewer.get(path).status_code == 404
        assert viewer.get(path, params={"conn_id": "delay_other"}).status_code == 200
        assert viewer.get(path, params={"conn_id": "delay_missing"}).status_code == 404


def test_airflow_lists_the_plugin(api_server: ApiServer) -> None:
    with api_server.client("admin") as client:
        plugins = client.get(f"{api_server.base_url}/api/v2/plugins").json()["plugins"]
        errors = client.get(f"{api_server.base_url}/api/v2/plugins/importErrors").json()
    [ours] = [plugin for plugin in plugins if plugin["name"] == "delay"]
    assert [app["url_prefix"] for app in ours["fastapi_apps"]] == ["/delay"]
    assert errors["total_entries"] == 0


# -- messages on their way ---------------------------------------------------------------------------------------------


def test_a_message_is_scheduled_listed_counted_delivered_and_shown_as_dispatched(api_server: ApiServer) -> None:
    """B1, B2, B14, B15, B47, B51"""
    channel = f"flow-{uuid4().hex}"
    due = datetime.now(UTC) + timedelta(hours=1)
    with api_server.client("admin") as client:
        created = client.post(
            f"channels/{channel}/messages", content=b"hi", headers={"X-Broker-Scheduled-For": due.isoformat()}
        )
        assert created.status_code == 201
        message_id = created.json()["message_id"]
        [listed] = client.get("messages", params={"channel": channel}).json()["messages"]
        assert (listed["id"], listed["state"], listed["link"]) == (message_id, "SCHEDULED", created.headers["location"])
        counts = client.get("counts", params={"channel": channel}).json()
        assert counts["counts"]["SCHEDULED"]["count"] == 1
        assert counts["next_scheduled_message_at"] == listed["deliver_at"]
        process = subprocess.Popen(
            [sys.executable, "-m", "airflow_delay_provider.dispatcher", "--ledger", api_server.ledger_url],
            preexec_fn=dies_with_parent(signal.SIGTERM),
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(
                lambda: any(each["status"] == "alive" for each in client.get("health").json()["dispatchers"]),
                what="a dispatcher",
            )
            assert client.post("actions/expedite", json={"ids": [message_id]}).json()["changed"] == 1
            found = wait_for(
                lambda: (
                    (seen := client.get(api_server.absolute(created.headers["location"])).json())["state"]
                    == "DISPATCHED"
                    and seen
                ),
                what="the message dispatched",
            )
        finally:
            stop(process, signals=[signal.SIGTERM])
        assert found["lateness_ms"] >= 0
        counts = client.get("counts", params={"channel": channel}).json()
        assert {name: each["count"] for name, each in counts["counts"].items() if each["count"]} == {"DISPATCHED": 1}
        assert counts["next_scheduled_message_at"] is None


def test_errors_have_their_status(api_server: ApiServer) -> None:
    """B3, B4, B5, B48, B52"""
    url = f"sqlite:///{api_server.folder / 'strict.db'}"
    api_server.define("delay_strict", conn_type="delay", extra={"ledger_url": url, "min_delay": 120})

    def post(at: str, message_id: str) -> httpx.Response:
        headers = {"X-Broker-Scheduled-For": at, "X-Broker-Message-Id": message_id}
        return client.post("channels/c/messages", params={"conn_id": "delay_strict"}, headers=headers)

    now = datetime.now(UTC)
    with api_server.client("admin") as client:
        assert post("soon", "a").status_code == 400
        assert post("2030-01-01T00:00:00", "a").status_code == 400
        assert post((now + timedelta(seconds=60)).isoformat(), "a").status_code == 412
        assert post((now + timedelta(hours=1)).isoformat(), "a").status_code == 201
        assert post((now + timedelta(hours=1)).isoformat(), "a").status_code == 409


def test_a_message_that_kafka_holds_is_cancelled(api_server: ApiServer) -> None:
    with stream_with_dispatcher(api_server.ledger_url) as stream, api_server.client("admin") as client:
        fields = kafka_connection_of(stream.bootstrap, **stream.settings)
        api_server.define(CONN_ID, **fields)
        body = {"channel": stream.topic(), "payload": "hi", "deliver_after": 3600, "conn_id": CONN_ID}
        created = client.post("messages", json=body)
        assert created.status_code == 201, created.text
        path = f"messages/{created.json()['message_id']}"
        found = wait_for(
            lambda: (answer := client.get(path)).status_code == 200 and answer.json(), what="the message in the ledger"
        )
        assert (found["held_by"], found["connection"], found["state"]) == ("broker", CONN_ID, "SCHEDULED")
        cancelled = client.post("actions/cancel", json={"ids": [found["id"]]})
        assert (cancelled.status_code, cancelled.json()["changed"]) == (200, 1), cancelled.text
        wait_for(lambda: client.get(path).json()["state"] == "CANCELLED", what="the message cancelled")
        assert client.post("actions/cancel", json={"ids": [found["id"]]}).status_code == 409


def test_a_message_that_rabbitmq_holds_cannot_be_recalled(api_server: ApiServer) -> None:
    with fresh_vhost() as url, api_server.client("admin") as client:
        declare_queue(url, "orders")
        config = config_of(url)
        with RabbitMQBroker(config) as rabbit:
            rabbit.create_topology(["orders"])
        api_server.define("rabbit", **connection_of(url))
        body = {"channel": "orders", "payload": "hi", "deliver_after": 3600, "conn_id": "rabbit"}
        created = client.post("messages", json=body)
        assert created.status_code == 201, created.text
        ledger = Ledger(api_server.ledger_url)
        context = Context(ledger=ledger, clock=SystemClock(), config=DispatcherConfig())
        index = ProjectJournal(context, "rabbit", lambda _: RabbitMQBroker(config))
        path = f"messages/{created.json()['message_id']}"

        def is_listed() -> bool:
            index.run_once()
            return client.get(path).status_code == 200

        wait_for(is_listed, what="the message in the ledger")
        index.close()
        ledger.close()
        for action, given in (("cancel", {}), ("expedite", {}), ("reschedule", {"deliver_after": 60})):
            answer = client.post(f"actions/{action}", json={"ids": [created.json()["message_id"]], **given})
            assert answer.status_code == 409, answer.text
            assert "is held by RabbitMQ itself and cannot be" in answer.json()["detail"]
        many = client.post("actions/cancel", json={"filter": {"connection": "rabbit"}}).json()
        assert (many["changed"], [each["status"] for each in many["refused"]]) == (0, [409])
