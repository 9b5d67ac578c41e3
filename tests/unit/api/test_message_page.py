"""The page of one message, for a user whom Airflow has let in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.api_fastapi.app import _AuthManagerState
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.core_api.security import get_user
from airflow.models.dag import DagModel
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import update

from airflow_delay_provider.api.app import REOPEN_AFTER, OpenLedgers, create_app
from airflow_delay_provider.api.message_page import (
    PREVIEW_BYTES,
    SHOWN_ENTRIES,
    describe_moment,
    describe_span,
    dispatcher_warning,
)
from airflow_delay_provider.brokers.ledger import projection
from airflow_delay_provider.brokers.ledger.heartbeats import GONE_AFTER
from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.domain.lifecycle import FROM_THE_START, Change, JournalEntry
from airflow_delay_provider.domain.message import Message, Origin
from airflow_delay_provider.hooks.delay import DelayHook
from airflow_delay_provider.plugins.delay import DelayPlugin
from airflow_delay_provider.testing.clock import START
from airflow_delay_provider.testing.kit import DelayTestKit
from tests.heartbeats import OWNER, WELL, dispatchers_of, let_pass, write_heartbeat
from tests.selective_auth import CLOSED_DAG, OPEN_DAG, SelectiveAuthManager

HOUR = timedelta(hours=1)
ATTACK = "<script>alert(1)</script>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, delay_connection: str) -> FastAPI:
    monkeypatch.setattr(_AuthManagerState, "instance", SelectiveAuthManager())
    # Whose team a DAG is in stands in Airflow's database, which these tests do without.
    monkeypatch.setattr(DagModel, "get_team_name", lambda _dag_id: None)
    return create_app()


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    become(app, "viewer")
    with TestClient(app) as opened:
        yield opened


def become(app: FastAPI, role: str | None) -> None:
    app.dependency_overrides[get_user] = lambda: SimpleAuthManagerUser(username="someone", role=role)


def words(html: str) -> str:
    """The page as a person reads it."""
    return " ".join(re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)).split())


def test_a_waiting_message_shows_its_content_and_due_time(client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule(
        "invoices", {"n": 7}, deliver_after=timedelta(hours=2, minutes=5), key="c-17", headers={"region": "eu"}
    )
    page = client.get(f"/messages/{message_id}")
    assert page.status_code == 200
    text = words(page.text)
    for part in [
        message_id,
        "scheduled channel invoices",
        "Due in 2 h 5 min 2030-01-01 02:05:00.000 UTC",
        "Dispatched not yet",
    ]:
        assert part in text
    for part in ["Key c-17", "Content type application/json", "7 bytes", "Handled 0 times", "region eu", "by a task"]:
        assert part in text
    assert "overdue" not in text


def test_a_dispatched_message_shows_its_lateness_in_milliseconds(client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule("invoices", deliver_after=60)
    delay_kit.clock.advance(timedelta(seconds=61, milliseconds=234))
    delay_kit.dispatch()
    text = words(client.get(f"/messages/{message_id}").text)
    assert "dispatched channel invoices" in text
    assert "Lateness 1,234 ms after the due time" in text
    assert text.index("scheduled 2030-01-01 00:01:00.000") < text.index("dispatched 2030-01-01 00:01:00.000")


def test_a_message_that_was_sent_at_once_is_shown_as_early(client: TestClient, delay_kit: DelayTestKit) -> None:
    message = Message(channel="invoices", payload=b"", deliver_at=START + timedelta(seconds=5))
    delay_kit.broker.send([message])
    assert "Lateness 5,000 ms before the due time" in words(client.get(f"/messages/{message.id}").text)


def test_a_cancelled_message_is_never_dispatched(client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule("invoices", deliver_after=60)
    delay_kit.broker.cancel([message_id])
    assert "Dispatched never" in words(client.get(f"/messages/{message_id}").text)


def test_a_message_that_is_due_and_still_waits_is_overdue(client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule("invoices", deliver_after=60)
    delay_kit.clock.advance(timedelta(seconds=75))
    assert "overdue by 15 s" in words(client.get(f"/messages/{message_id}").text)


def test_a_waiting_message_without_a_dispatcher_says_so(client: TestClient, delay_kit: DelayTestKit) -> None:
    """B41"""
    message_id = delay_kit.schedule("invoices", deliver_after=HOUR)
    assert 'class="warning' not in client.get(f"/messages/{message_id}").text
    let_pass(delay_kit.broker.ledger, GONE_AFTER)
    page = client.get(f"/messages/{message_id}").text
    assert re.search(r'class="warning text" role="status">No dispatcher has been seen since .* UTC \(', page)
    assert "start one with `airflow delay dispatcher`." in page
    delay_kit.advance(HOUR)
    assert 'class="warning' not in client.get(f"/messages/{message_id}").text


def test_a_dispatcher_that_cannot_work_is_named_with_its_reason(client: TestClient, delay_kit: DelayTestKit) -> None:
    """B41"""
    message_id = delay_kit.schedule("invoices", deliver_after=HOUR)
    let_pass(delay_kit.broker.ledger, GONE_AFTER)
    failing = {**WELL, "well": False, "failures": 2, "error": f"LedgerError: {ATTACK}"}
    write_heartbeat(delay_kit.broker.ledger, loops={"dispatch_embedded": failing})
    page = client.get(f"/messages/{message_id}").text
    assert f"Dispatcher {OWNER} runs, but its loop dispatch_embedded failed 2 times since" in page
    assert ESCAPED in page


@pytest.mark.parametrize(
    ("needs_dispatcher", "kafka_connections", "warned"), [(False, [], 0), (True, [], 0), (True, ["far"], 1)]
)
def test_a_message_that_a_broker_holds_misses_only_a_dispatcher_that_is_known_to_serve_it(
    delay_kit: DelayTestKit, needs_dispatcher: bool, kafka_connections: list[str], warned: int
) -> None:
    """RabbitMQ needs none, and one for Kafka may use another ledger."""
    record = replace(delay_kit.record(delay_kit.schedule("c", deliver_after=HOUR)), held_by_broker=True)
    write_heartbeat(delay_kit.broker.ledger, kafka_connections=kafka_connections)
    let_pass(delay_kit.broker.ledger, GONE_AFTER)
    found = dispatcher_warning(
        record, dispatchers_of(delay_kit.broker.ledger), conn_id="far", needs_dispatcher=needs_dispatcher
    )
    assert bool(found) == bool(warned)


def test_a_dead_message_shows_the_reason(client: TestClient, delay_kit: DelayTestKit) -> None:
    def refuse(_message: object) -> None:
        raise ValueError("no such customer")

    message_id = delay_kit.schedule("invoices")
    delay_kit.consume("invoices", refuse)
    text = words(client.get(f"/messages/{message_id}").text)
    assert "dead-lettered" in text
    assert "no such customer" in text


def test_a_long_history_shows_its_latest_part(client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule("invoices", deliver_after=60)
    for minute in range(SHOWN_ENTRIES + 2):
        delay_kit.broker.reschedule([message_id], START + timedelta(minutes=minute + 2))
    page = client.get(f"/messages/{message_id}").text
    assert "3 earlier entries are not shown" in page
    assert page.count('<span class="state scheduled">rescheduled</span>') == SHOWN_ENTRIES


def test_nothing_a_message_contains_becomes_markup(client: TestClient, delay_kit: DelayTestKit) -> None:
    def refuse(_message: object) -> None:
        raise ValueError(ATTACK)

    message_id = delay_kit.schedule(
        "invoices",
        ATTACK,
        message_id=f"{ATTACK}'\"",
        key=ATTACK,
        headers={ATTACK: ATTACK},
        content_type=f"text/{ATTACK}",
        origin=Origin(dag_id=OPEN_DAG, run_id=ATTACK, task_id='"><img src=x onerror=alert(1)>'),
    )
    delay_kit.consume("invoices", refuse)
    page = client.get(f"/messages/{message_id.replace('/', '%2F')}")
    assert page.status_code == 200
    assert "<script" not in page.text
    assert "<img" not in page.text
    assert page.text.count(ESCAPED) >= 7
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_an_attack_in_the_address_is_escaped_too(client: TestClient) -> None:
    for page in (client.get(f"/messages/{ATTACK}"), client.get("/messages/x", params={"conn_id": ATTACK})):
        assert page.status_code == 404
        assert "<script" not in page.text
        assert ESCAPED in page.text


def test_the_style_is_the_one_that_the_policy_allows(client: TestClient) -> None:
    page = client.get("/messages/unknown")
    style = re.search(r"<style>(.*?)</style>", page.text, flags=re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in page.headers["content-security-policy"]


def test_values_under_sensitive_names_are_hidden(client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule(
        "invoices", {"customer": "c-17", "nested": [{"password": "hunter2"}]}, headers={"api_key": "hunter3"}
    )
    page = client.get(f"/messages/{message_id}").text
    assert "hunter" not in page
    assert "***" in page
    assert "c-17" in page


@pytest.mark.parametrize(
    ("payload", "content_type", "shown"),
    [
        (b'{"a":[1]}', "application/json; charset=utf-8", "{ &#34;a&#34;: [ 1 ] }"),
        (b'{"a":1}', "application/cloudevents+json", "{ &#34;a&#34;: 1 }"),
        (b"{broken", "application/json", "{broken"),
        (b"[" * 20_000, "application/json", "[" * PREVIEW_BYTES + "…"),
        (rb'"\ud800"', "application/json", r"\ud800"),
        (b"caf\xe9", "text/plain", "caf\ufffd"),
        ("é".encode() * PREVIEW_BYTES, "text/plain", "é" * (PREVIEW_BYTES // 2) + "…"),
        (b"\x00\x01", "application/octet-stream", "2 bytes of application/octet-stream, not shown as text"),
        (b"", "text/plain", "Empty."),
    ],
    ids=["json", "json-suffix", "broken", "deep", "half-character", "not-utf8", "long", "binary", "empty"],
)
def test_a_payload_is_shown_as_far_as_it_is_text(
    client: TestClient, delay_kit: DelayTestKit, payload: bytes, content_type: str, shown: str
) -> None:
    message_id = delay_kit.schedule("invoices", payload, content_type=content_type)
    page = client.get(f"/messages/{message_id}")
    assert page.status_code == 200
    assert shown in " ".join(page.text.split())


@pytest.mark.parametrize(
    ("map_index", "path"),
    [
        (-1, "/dags/open_invoices/runs/manual__2030-01-01T00%3A00%3A00%2B00%3A00/tasks/group.remind"),
        (0, "/dags/open_invoices/runs/manual__2030-01-01T00%3A00%3A00%2B00%3A00/tasks/group.remind/mapped/0"),
    ],
)
def test_the_origin_leads_to_its_task_instance(
    client: TestClient, delay_kit: DelayTestKit, map_index: int, path: str
) -> None:
    origin = Origin(
        dag_id=OPEN_DAG, run_id="manual__2030-01-01T00:00:00+00:00", task_id="group.remind", map_index=map_index
    )
    message_id = delay_kit.schedule("invoices", origin=origin)
    assert f'href="{path}"' in client.get(f"/messages/{message_id}").text


def test_links_stay_below_the_path_that_airflow_is_served_under(app: FastAPI, delay_kit: DelayTestKit) -> None:
    origin = Origin(dag_id=OPEN_DAG, run_id="r", task_id="t")
    message_id = delay_kit.schedule("invoices", origin=origin)
    become(app, "viewer")
    airflow = FastAPI(root_path="/team-a")
    airflow.mount("/delay", app)
    page = TestClient(airflow).get(f"/team-a/delay/messages/{message_id}")
    assert 'href="/team-a/dags/open_invoices/runs/r/tasks/t"' in page.text


def test_a_message_of_a_dag_that_the_user_may_not_read_is_refused(
    app: FastAPI, client: TestClient, delay_kit: DelayTestKit
) -> None:
    origin = Origin(dag_id=CLOSED_DAG, run_id="r", task_id="t")
    message_id = delay_kit.schedule("salaries", "top secret", origin=origin)
    page = client.get(f"/messages/{message_id}")
    assert page.status_code == 403
    assert "You may not see this message" in page.text
    for part in ("salaries", "top secret", CLOSED_DAG):
        assert part not in page.text
    become(app, "admin")
    assert client.get(f"/messages/{message_id}").status_code == 200


def test_a_user_without_a_role_sees_nothing(app: FastAPI, client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule("invoices")
    become(app, None)
    assert client.get(f"/messages/{message_id}").status_code == 403


def test_without_a_user_every_address_asks_to_sign_in(app: FastAPI, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule("invoices", "top secret")
    for path in (f"/messages/{message_id}?conn_id=other", "/messages/unknown"):
        page = TestClient(app).get(path)
        assert page.status_code == 401
        assert "top secret" not in page.text
        assert "/api/v2/auth/login?next=%2Fmessages%2F" in page.text
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert TestClient(app).get(path).status_code == 404


def test_an_unknown_id_is_answered_with_a_sentence(client: TestClient) -> None:
    page = client.get("/messages/nobody-knows-it")
    assert page.status_code == 404
    assert "has no message &#39;nobody-knows-it&#39;" in page.text


def test_an_id_may_contain_slashes(client: TestClient, delay_kit: DelayTestKit) -> None:
    delay_kit.schedule("invoices", message_id="2030/01/01 #7?")
    assert client.get("/messages/2030%2F01%2F01%20%237%3F").status_code == 200


def test_a_ledger_that_is_down_is_answered_with_its_error(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.db").write_bytes(b"this is no database at all" * 100)
    define_connection(monkeypatch, "delay_default", f"sqlite:///{tmp_path / 'broken.db'}")
    page = client.get("/messages/any")
    assert page.status_code == 503
    assert "file is not a database" in page.text


def test_a_broken_row_is_answered_with_its_error(client: TestClient, delay_kit: DelayTestKit) -> None:
    message_id = delay_kit.schedule("invoices")
    with delay_kit.broker.ledger.engine.begin() as connection:
        connection.execute(update(scheduled_message).values(channel=ATTACK))
    page = client.get(f"/messages/{message_id}")
    assert page.status_code == 503
    assert ESCAPED in page.text
    assert "<script" not in page.text


def test_a_wrong_default_connection_is_answered_with_what_is_wrong(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DELAY_DEFAULT", "http://example.com")
    page = client.get("/messages/any")
    assert page.status_code == 503
    assert "has type &#39;http&#39;" in page.text


def test_the_default_connection_needs_no_definition(
    client: TestClient, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_DELAY_DEFAULT")
    message_id = delay_kit.schedule("invoices")
    assert client.get(f"/messages/{message_id}").status_code == 200


def test_another_connection_has_its_own_ledger(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with DelayTestKit(f"sqlite:///{tmp_path / 'other.db'}") as other:
        message_id = other.schedule("invoices")
        define_connection(monkeypatch, "delay_other", other.url)
        assert client.get(f"/messages/{message_id}").status_code == 404
        page = client.get(f"/messages/{message_id}", params={"conn_id": "delay_other"})
    assert page.status_code == 200
    assert "delay_other" in page.text


def test_a_message_that_a_broker_holds_is_shown_from_the_configured_ledger(
    client: TestClient, delay_kit: DelayTestKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A45: and no message of another connection."""
    own = delay_kit.schedule("invoices")
    held = Message(id="held", channel="orders", payload=b"hello", deliver_at=START + timedelta(hours=2))
    entry = JournalEntry(
        message_id="held",
        change=Change.SCHEDULED,
        at=START,
        channel="orders",
        deliver_at=held.deliver_at,
        position="1",
        message=held,
    )
    delay_kit.broker.ledger.transact(
        lambda c: projection.project(c, "rabbit", [entry], after=FROM_THE_START, position="1")
    )
    real = DelayHook.get_conn
    broker = SimpleNamespace(clock=delay_kit.clock, ledger=None)
    monkeypatch.setattr(DelayHook, "get_conn", lambda hook: broker if hook.delay_conn_id == "rabbit" else real(hook))
    monkeypatch.setenv("AIRFLOW__DELAY__LEDGER_URL", delay_kit.url)
    page = client.get("/messages/held", params={"conn_id": "rabbit"})
    assert page.status_code == 200
    assert "Due in 2 h" in words(page.text)
    assert client.get(f"/messages/{own}", params={"conn_id": "rabbit"}).status_code == 404


def test_the_page_does_not_reveal_which_connections_exist(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", "postgresql://warehouse.internal")
    existing = client.get("/messages/any", params={"conn_id": "warehouse"})
    missing = client.get("/messages/any", params={"conn_id": "nothing_here"})
    assert existing.status_code == missing.status_code == 404
    assert words(existing.text).replace("warehouse", "nothing_here") == words(missing.text)


def test_a_ledger_is_opened_once_and_closed_with_the_application(app: FastAPI, delay_kit: DelayTestKit) -> None:
    become(app, "viewer")
    ledgers: OpenLedgers = app.state.ledgers
    with TestClient(app) as client:
        for _ in range(2):
            assert client.get(f"/messages/{delay_kit.schedule('invoices')}").status_code == 200
        opened = ledgers.get("delay_default").ledger
        assert ledgers.get("delay_default").ledger is opened
        assert opened.engine.pool.checkedin() == 1
    assert opened.engine.pool.checkedin() == 0


def test_a_changed_connection_is_noticed_after_a_while(
    delay_connection: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = [0.0]
    ledgers = OpenLedgers(monotonic=lambda: seconds[0])
    before = ledgers.get(delay_connection).ledger
    define_connection(monkeypatch, delay_connection, f"sqlite:///{tmp_path / 'new.db'}")
    assert ledgers.get(delay_connection).ledger is before
    seconds[0] = REOPEN_AFTER.total_seconds()
    assert ledgers.get(delay_connection).ledger.url.database == str(tmp_path / "new.db")
    ledgers.close()


def test_the_plugin_mounts_the_application() -> None:
    plugin = DelayPlugin()
    [mounted] = plugin.fastapi_apps
    assert (plugin.name, mounted["url_prefix"]) == ("delay", "/delay")
    assert isinstance(mounted["app"], FastAPI)
    assert plugin.fastapi_apps[0]["app"] is mounted["app"]


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(days=3, hours=4, minutes=5), "3 d 4 h"),
        (timedelta(days=3, minutes=5), "3 d"),
        (timedelta(minutes=-5, seconds=-2), "5 min 2 s"),
        (timedelta(seconds=59, milliseconds=999), "59 s"),
        (timedelta(milliseconds=250), "250 ms"),
        (timedelta(0), "0 ms"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(span: timedelta, text: str) -> None:
    assert describe_span(span) == text


def test_a_time_is_shown_relative_to_now() -> None:
    assert describe_moment(START + timedelta(hours=1), START) == "in 1 h"
    assert describe_moment(START - timedelta(hours=1), START) == "1 h ago"
    assert describe_moment(START, START) == "now"


def define_connection(monkeypatch: pytest.MonkeyPatch, conn_id: str, url: str) -> None:
    connection: dict[str, Any] = {"conn_type": "delay", "extra": {"ledger_url": url}}
    monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(connection))
